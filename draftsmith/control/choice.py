"""From a controller's name and options, as people write them, to the controller.

Called by the engine when it is made, and by commands that want a wrong name refused before a model is loaded.
"""

from __future__ import annotations

import inspect

from draftsmith.control.base import Controller
from draftsmith.errors import OptionError
from draftsmith.registry import CONTROLLERS, load_class, parse_selection, read_options


def make_controller(text: str) -> Controller:
    """The controller of a selection, `NAME[:key=value]*`. Raises `OptionError`."""
    selection = parse_selection(text, CONTROLLERS, "controller")
    controller_class = load_class(selection)
    if not issubclass(controller_class, Controller) or inspect.isabstract(controller_class):
        raise OptionError(f"{selection.target} is not a Controller with all its methods")
    options = read_options(controller_class.Options, selection.options, f"controller {text}")
    return controller_class.create(options)
