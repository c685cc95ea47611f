"""Events for tests."""

from itertools import count

from elsa.workspace.events import LabelEvent

tokens = count()


def say(image, label, who="ann", **more):
    return LabelEvent(who=who, image=image, label=label, **{"request": f"t{next(tokens)}"} | more)
