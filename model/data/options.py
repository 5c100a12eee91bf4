"""Arguments and options that several commands of `dragoman data` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from model.data.filters import RULES, FilterConfig

Tables = Annotated[
    list[Path],
    typer.Argument(help="Parallel text: tab-separated tables, plain, .gz or .zst; or one source side."),
]
TargetText = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option(help="The target side, line by line like TEXT, which is then no table."),
]
SourceColumn = Annotated[int, typer.Option(help="Column of the table, from 1; negative: from the end.")]
TargetColumn = Annotated[int, typer.Option(help="Column of the table, from 1; negative: from the end.")]
Where = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        help="Only rows whose cell is one of these: COLUMN=VALUE[,VALUE...], columns from 1; may be repeated."
    ),
]
Source = Annotated[str, typer.Option("--source", "-s", help="Source language, BCP-47.")]
Target = Annotated[str, typer.Option("--target", "-t", help="Target language, BCP-47.")]
Exclude = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(help="File of test sentences, one a line, that must not come; may be repeated."),
]
Off = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help=f"Rule that is not applied: {', '.join(RULES)}; may be repeated."),
]
Set = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--set",
        help="Limit of a rule, NAME=VALUE; may be repeated. "
        + ", ".join(
            f"{name}={field.default}" for name, field in FilterConfig.model_fields.items() if name != "off"
        ),
    ),
]
Seed = Annotated[
    int, typer.Option(min=-(1 << 63), max=(1 << 63) - 1, help="Another seed chooses other texts.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
Column = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Column of the table, from 1; negative: from the end. Default: a line is a text."),
]
