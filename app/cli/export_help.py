"""What `dragoman export` answers where the libraries that exporting needs are missing."""

from __future__ import annotations

EXPORT_HELP = """\
Usage: dragoman export COMMAND [ARGS]...

Make a bundle from a checkpoint.

Commands:
  marian          Import a Marian model (Firefox Translations, Bergamot):
                  dragoman export marian DIR --source xx --target yy --out BUNDLE
  record-quality  Write measured scores into a bundle's manifest.
  shortlist       Make a lexical shortlist from parallel text, for a bundle or as a file.

Each command has its own --help once everything is installed.
"""


def needs(module: str) -> str:
    """The sentence that says what is missing and how to get it.

    Args:
        module: what could not be imported.
    """
    return (
        f"export needs {module}, which the service does without. In a checkout of dragoman, `make test` "
        "installs it, or: .venv/bin/pip install -c constraints.txt -e '.[cpu,train]'"
    )
