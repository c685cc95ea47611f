"""Labelling: the store of what people said, what to ask them next, what their words say, and files in and out."""
