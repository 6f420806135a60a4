"""`draftsmith data prepare`: raw texts become token ids with a mask, ready to train on.

Called by `app`. Invariant: Ctrl-C and mistakes leave nothing behind, and an older output as it was.
"""

from __future__ import annotations

import json
from pathlib import Path

from draftsmith.cli.console import note
from draftsmith.cli.data_options import PrepareOptions
from draftsmith.cli.data_progress import PrepareBar
from draftsmith.training import prepare


def run(options: PrepareOptions) -> int:
    """Run the command; returns the exit code."""
    wanted = prepare.PrepareOptions(max_len=options.max_len, validation=options.validation)
    prepare.check_output(options.output, force=options.force)
    target = prepare.open_target(options.model)
    with PrepareBar() as bar:
        figures = prepare.prepare(options.input, target, options.output, wanted, bar.update)
    found = figures.as_json()
    if options.json:
        print(json.dumps({"output": str(options.output), "model": options.model, **found}, ensure_ascii=False))
    for side in (prepare.TRAIN, prepare.VALIDATION):
        counts = found[side]
        if counts["texts"]:
            note(
                f"{options.output / Path(side)}: {counts['texts']} texts, {counts['tokens']} tokens, "
                f"{counts['answer_tokens']} of them in answers"
            )
    if figures.cut:
        note(f"{figures.cut} texts were cut at {options.max_len} tokens")
    if figures.split:
        note(f"{figures.split} conversations were split by answers: the chat template rewrites what was said before")
    for reason, number in figures.left_out.most_common():
        note(f"{number} texts were left out: {reason}")
    return 0
