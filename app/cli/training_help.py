"""What the commands of the training side answer where the libraries that they need are missing."""

from __future__ import annotations

TRAINING_HELP = {
    "export": """\
Usage: dragoman export COMMAND [ARGS]...

Make a bundle from a checkpoint.

Commands:
  marian             Import a Marian model (Firefox Translations, Bergamot):
                     dragoman export marian DIR --source xx --target yy --out BUNDLE
  trained            Make a bundle of a model folder that was trained here.
  weights            Make a model folder of a bundle, to train on or to learn from.
  average            Make a model folder whose weights are the mean of several runs'.
  record-quality     Write measured scores into a bundle's manifest.
  shortlist          Make a lexical shortlist from parallel text, for a bundle or as a file.
  compact-shortlist  Make a bundle's shortlist smaller: what most lists hold is written once.

Each command has its own --help once everything is installed.
""",
    "data": """\
Usage: dragoman data COMMAND [ARGS]...

Clean, sample and hold out training text.
""",
    "train": """\
Usage: dragoman train CONFIG

Train a Transformer on parallel text, as the TOML file CONFIG says.
""",
    "distil": """\
Usage: dragoman distil CONFIG

Train a student on a teacher's translations, as the TOML file CONFIG says.
""",
    "evaluate": """\
Usage: dragoman evaluate SYSTEM... --testset NAME=SOURCE,REFERENCE

Score bundles, services or files of translations on test sets.
""",
    "plot": """\
Usage: dragoman plot COMMAND [ARGS]...

Draw what a model does and how its training went.
""",
}


def needs(command: str, module: str) -> str:
    """The sentence that says what is missing and how to get it.

    Args:
        command: of `dragoman`.
        module: what could not be imported.
    """
    return (
        f"{command} needs {module}, which the service does without. In a checkout of dragoman, `make tools` "
        "installs it, or: .venv/bin/pip install -c constraints.txt -e '.[cpu,train]'"
    )
