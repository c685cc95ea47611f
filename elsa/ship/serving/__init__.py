"""The parts of `elsa serve`: limits, bodies, batches, metrics, drift and the web application around them."""
