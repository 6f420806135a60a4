"""`draftsmith calibrate`: measure what steps cost on this machine, and keep it for the controllers.

Called by `app`. What is done is written at once, so Ctrl-C loses only the part that was under way, and says which.
Invariants: options and places are checked before a model is loaded, and no model is loaded to show or refresh a table;
a table that is there is replaced whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli.calibrate_options import CalibrateOptions
from draftsmith.cli.calibrate_view import print_costs
from draftsmith.cli.console import note
from draftsmith.cli.interrupts import INTERRUPTED
from draftsmith.errors import DataError, OptionError
from draftsmith.io.fingerprint import FILE_FACTS

if TYPE_CHECKING:
    from draftsmith.bench.runs import Measured
    from draftsmith.control.cost_table import CostTable

_LEARNED = "learned"
"""In a table's `about`: digests of the bundles it was refreshed from."""


def run(options: CalibrateOptions) -> int:
    """Run the command; returns the exit code."""
    _check(options)
    from draftsmith.engine.cost_store import check_cost_directory, cost_file, write_costs
    from draftsmith.engine.loading import model_identity

    if not options.show:
        check_cost_directory()
    identity = model_identity(options.model, backend=options.backend, dtype=options.dtype, threads=options.threads)
    path = cost_file(identity)
    if options.show:
        table = _kept(options, identity)
    elif options.refresh is not None:
        table = _refreshed(_kept(options, identity), options.refresh, identity)
        write_costs(table, path)
    else:
        from draftsmith.cli.calibrate_measuring import Measuring

        measuring = Measuring(options, path)
        try:
            table = measuring.run()
        except KeyboardInterrupt:
            note(f"interrupted: {measuring.left}")
            return INTERRUPTED
    if options.picture is not None:
        from draftsmith.bench.cost_picture import draw_costs

        draw_costs(table, options.picture)
    print_costs(table, path, as_json=options.json)
    return 0


def _check(options: CalibrateOptions) -> None:
    from draftsmith.registry import DRAFTERS, parse_selection

    if options.show and options.refresh is not None:
        raise OptionError("--show changes nothing: leave --refresh out, which shows the table it makes")
    if options.show or options.refresh is not None:
        only = "--show" if options.show else "--refresh"
        for name, given in (
            ("--drafter", options.drafter),
            ("--repeats", options.repeats),
            ("--max-context", options.max_context),
        ):
            if given:
                raise OptionError(f"{only} measures nothing: leave {name} out")
    if options.repeats is not None and options.repeats < 3:
        raise OptionError(f"--repeats is {options.repeats}; a median wants at least 3")
    if options.max_context is not None and options.max_context < 64:
        raise OptionError(f"--max-context is {options.max_context}; it must be at least 64")
    for drafter in options.drafter:
        parse_selection(drafter, DRAFTERS, "drafter")
    if options.picture is not None:
        from draftsmith.bench.cost_picture import check_picture

        check_picture(options.picture)


def _kept(options: CalibrateOptions, identity: Mapping[str, Any]) -> CostTable:
    from draftsmith.engine.cost_store import read_costs

    table = read_costs(identity)
    if table is None:
        raise DataError(
            f"nothing is known of {options.model} on this processor with these threads and this backend; "
            f"run draftsmith calibrate --model {options.model}"
        )
    return table


def _refreshed(table: CostTable, bundle: Path, identity: Mapping[str, Any]) -> CostTable:
    """The table after the steps of a benchmark of the same model, run the same way. Raises `UserError`s."""
    from draftsmith.bench.bundle import read

    measured = read(bundle)
    differing = _differing(measured, identity)
    if differing is not None:
        raise DataError(f"{bundle} cannot refresh these costs: {differing}")
    # It holds the date, so that another run with the same options is another bundle.
    digest = hashlib.sha256((bundle / "config.json").read_bytes()).hexdigest()[:20]
    learned = list(table.about.get(_LEARNED, ()))
    if digest in learned:
        raise DataError(f"{bundle} was learned from before: its steps are in these costs already")
    found = table
    for run_of_arm in measured.runs:
        found = found.refreshed(run_of_arm.events)
    if found == table:
        raise DataError(f"{bundle} teaches nothing: it holds no steps but those that read prompts")
    busy = max(measured.other_cores or 0.0, table.about.get("other_cores") or 0.0)
    about = {**table.about, "other_cores": busy, _LEARNED: [*learned, digest]}
    return dataclasses.replace(found, about=about)


def _differing(measured: Measured, identity: Mapping[str, Any]) -> str | None:
    """In what a benchmark's steps were run otherwise; None where they were not."""
    arms: Iterable[Mapping[str, Any]] = measured.config["descriptions"].values()
    found = [arm["details"].get("identity") for arm in arms if arm["engine"] == "draftsmith"]
    if not found or not all(isinstance(one, dict) and one for one in found):
        return "it does not say of which model file its steps are; run draftsmith bench again"
    for one in found:
        if any(one.get(name) != identity[name] for name in FILE_FACTS):
            return f"its model {measured.config['model']} is another file"
        for name, here in identity.items():
            if one.get(name) != here:
                return f"its {name} is {one.get(name)} and not {here}"
    return None
