"""The command line, one file a command; here are the group, exit codes and one-line errors.

Exit codes: 0 done; 2 the user's input is wrong; 1 a failure of ours or the machine's; 128 + n after
signal n.
"""

import difflib
import importlib
import os
import sys

import click

from llmq_nb.core.errors import EXIT_FAILURE, EXIT_USER, MachineError, UserError

COMMANDS = (
    "train",
    "tokenize",
    "inspect",
    "export",
    "generate",
    "eval",
    "plot",
    "report",
    "replay",
    "plan",
    "compile",
    "bench",
    "doctor",
)


class Commands(click.Group):
    """Commands by file name, imported when they are called: `--help` needs no NumPy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            if near:
                raise UserError(f"no command {cmd_name!r}", mend=f"did you mean {near[0]!r}?")
            return None
        return importlib.import_module(f"llmq_nb.cli.{cmd_name}_command").command


@click.group(
    cls=Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="llmq-nb", prog_name="llmq-nb")
def group() -> None:
    """Pre-train and fine-tune language models on the GPUs that one person owns."""


def main() -> None:
    """The entry point: errors of the user or the machine are one line, no traceback."""
    try:
        code = group.main(standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        fail(str(error), EXIT_USER)
    except MachineError as error:
        fail(str(error), EXIT_FAILURE)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        asked = context.info_name if context is not None and context.parent is not None else None
        more = f"llmq-nb {asked} --help" if asked else "llmq-nb --help"
        fail(f"{error.format_message().rstrip('.')}: see {more}", EXIT_USER)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", 128 + 2)
    except BrokenPipeError:  # the reader of our output has left: nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{place}", EXIT_FAILURE)
    except MemoryError as error:
        fail(f"not enough memory: {error}", EXIT_FAILURE)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def fail(line: str, code: int) -> None:
    """One line to stderr, then exit."""
    print(f"llmq-nb: {' '.join(line.split())}", file=sys.stderr, flush=True)
    sys.exit(code)
