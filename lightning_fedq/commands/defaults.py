"""Help of a command that shows the default of every option."""

from __future__ import annotations

import argparse


class ShowDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help formatter that adds the default of an option, unless it is None or in words already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)
