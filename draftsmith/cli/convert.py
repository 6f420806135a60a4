"""`draftsmith convert`: a published drafter becomes a native one, or a native one is written as others read it.

Called by `app`. What was translated is printed line by line, for that is where conversions go wrong silently.
Invariants: everything is checked before anything is written; an output appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli.console import note
from draftsmith.cli.convert_options import ConvertOptions
from draftsmith.errors import DraftsmithError, OptionError

if TYPE_CHECKING:
    from draftsmith.cli.convert_check import Checked
    from draftsmith.dialects.dialect import Choices, Note, Target
    from draftsmith.dialects.published import Published
    from draftsmith.drafters.checkpoint import Checkpoint

NATIVE, AUTO = "native", "auto"


def run(options: ConvertOptions) -> int:
    """Run the command; returns the exit code."""
    choices = choices_of(options)
    _check_places(options)
    from draftsmith.dialects.convert import export, import_published, read_native, write_export
    from draftsmith.dialects.published import open_published
    from draftsmith.dialects.table import detect, dialect_named
    from draftsmith.drafters.checkpoint import save_checkpoint

    wanted = None if options.to == NATIVE else dialect_named(options.to)
    published = open_published(options.source)
    is_native = _is_native(published, options)
    if is_native and wanted is None:
        raise OptionError(f"{options.source} is of this package already; say --to NAME for another's layout")
    target = open_target(options, published, is_native)
    checked: Checked | None = None
    notes: list[Note] = []
    if is_native:
        origin, checkpoint = NATIVE, read_native(published.path, target)
    else:
        found = detect(published) if options.from_ == AUTO else dialect_named(options.from_)
        imported = import_published(published, found, target, choices, options.output)
        origin, checkpoint, notes = found.name, imported.checkpoint, list(imported.notes)
        if not options.no_check:
            checked = _check(checkpoint, options, target)
    if wanted is None:
        save_checkpoint(_with_history(checkpoint, options.source, origin))
    else:
        exported = export(checkpoint, wanted, target, choices)
        notes += exported.notes
        write_export(exported, options.output)
    _tell(options, origin, checkpoint, notes, checked)
    return 0


def choices_of(options: ConvertOptions) -> Choices:
    """What the user pins. Raises `OptionError`."""
    from draftsmith.dialects.dialect import Choices
    from draftsmith.dialects.layer_ids import check_convention

    check_convention(options.layer_ids)
    if options.num_draft < 1:
        raise OptionError(f"--num-draft {options.num_draft}: at least 1 is needed")
    changes = {}
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise OptionError(f"--set {item}: write KEY=VALUE")
        changes[key] = value
    return Choices(
        layer_ids=options.layer_ids, changes=changes, with_target=options.with_target, num_draft=options.num_draft
    )


def _check_places(options: ConvertOptions) -> None:
    from draftsmith.io.staging import check_drafter_output

    output = options.output
    check_drafter_output(output, is_drafter=lambda path: (path / "config.json").exists())
    if output.exists() and output.resolve() == Path(options.source).expanduser().resolve():
        raise OptionError(f"output {output} is the source itself; give another directory")
    if output.exists() and not options.force:
        raise OptionError(f"output {output} exists; give another, or --force to replace it")


def _is_native(published: Published, options: ConvertOptions) -> bool:
    marked = isinstance(published.config.get("draftsmith"), int)
    if options.from_ not in (AUTO, NATIVE):
        return False
    if options.from_ == NATIVE and not marked:
        raise OptionError(f"{options.source} is not a drafter of this package")
    return marked


def open_target(options: ConvertOptions, published: Published, is_native: bool) -> Target:
    """The target's files; its weights are read when something is compared with them. Raises `UserError`s."""
    from draftsmith.dialects.dialect import Target
    from draftsmith.io.files import open_model
    from draftsmith.models.spec import DecoderSpec

    name = options.model
    if name is None and is_native:
        trained_for = published.config.get("target")
        name = trained_for.get("name") if isinstance(trained_for, dict) else None
    if not isinstance(name, str):
        raise OptionError("say which model it drafts for: --model NAME")
    files = open_model(name)
    return Target(name=name, spec=DecoderSpec.from_config(files.config), files=files)


def _with_history(checkpoint: Checkpoint, source: str, dialect: str) -> Checkpoint:
    """Where an import came from, kept with it; one that was ours before keeps its own history."""
    if checkpoint.about:
        return checkpoint
    return dataclasses.replace(checkpoint, about={"imported": {"source": source, "dialect": dialect}})


def _check(checkpoint: Checkpoint, options: ConvertOptions, target: Target) -> Checked | None:
    """How the drafter does beside its target; None, with a line, where the target cannot be run here."""
    from draftsmith.cli.convert_check import check_drafter

    try:
        return check_drafter(checkpoint, target.name, backend=options.backend, threads=options.threads)
    except (DraftsmithError, MemoryError) as error:
        note(f"not checked, {target.name} cannot be run here: {error or 'not enough memory'}")
        return None


def _tell(
    options: ConvertOptions, origin: str, checkpoint: Checkpoint, notes: list[Note], checked: Checked | None
) -> None:
    warnings = [] if checked is None else checked.warnings
    if options.json:
        document: dict[str, Any] = {
            "source": options.source,
            "from": origin,
            "to": options.to,
            "output": str(options.output),
            "method": checkpoint.method,
            "model": checkpoint.target.get("name"),
            "translated": [{"topic": topic, "text": text} for topic, text in notes],
            "check": None if checked is None else checked.as_json(),
            "warnings": warnings,
        }
        print(json.dumps(document, ensure_ascii=False))
        return
    print(f"{options.source} ({origin}) -> {options.output} ({options.to}), {checkpoint.method}")
    width = max((len(topic) for topic, _ in notes), default=0)
    for topic, text in notes:
        print(f"  {topic:{width}}  {text}")
    if checked is not None:
        print(f"  {'check':{width}}  {checked.line()}")
    for warning in warnings:
        note(f"warning: {warning}")
    if options.to == NATIVE:
        print(f"use it: draftsmith generate --model {checkpoint.target.get('name')} "
              f"--drafter {checkpoint.method}:path={options.output} \"...\"")  # fmt: skip
