"""`planner`: the command line. Verbs live in planner/commands; nothing heavy is imported before a verb runs.

Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 a bug, 2 usage or an invalid file, 3 no feasible plan, 4 a target was missed,
5 a calibration is required but missing or stale, 6 a run failed, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from planner.commands import (
    calibrate,
    data,
    diagnose,
    doctor,
    estimate,
    explain,
    export,
    ledger,
    record,
    report,
    run,
    search,
    sensitivity,
    size,
    validate,
    waterfall,
    whatif,
)
from planner.errors import BUG, INTERRUPTED, USAGE, FileError, PlannerError, UsageError

app = typer.Typer(
    add_completion=True,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plans, runs and scores the training of GEM-like recommendation models.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 bug, 2 usage or invalid file, 3 no feasible plan, 4 target missed, 5 calibration required, "
    "6 run failed, 130 interrupted.",
)
for module in (doctor, data, calibrate, estimate, search, sensitivity, size, run, validate, whatif, ledger, diagnose, waterfall, explain, record,
               report, export):
    app.command(module.__name__.rsplit(".", 1)[-1])(module.command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's) and returns the exit code; a message, never a traceback, for what can be explained."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "" in words:
            raise UsageError("an argument is empty; is a variable of the shell unset?")
        answer = typer.main.get_command(app)(words or ["--help"], prog_name="planner", standalone_mode=False)
        return answer if isinstance(answer, int) else 0
    except (PlannerError, KeyboardInterrupt) as error:
        return _report(error, json_wanted="--json" in words)
    except (BrokenPipeError, SystemExit) as error:
        # The reader went away (`planner ... | head`), which click turns into an exit with 1; what is still buffered must not raise again at exit.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Names too long, no permission, a full disk: what the system says, about which file.
        where = f"{str(error.filename)[:200]}: " if error.filename else ""
        return _report(UsageError(f"{where}{error.strerror or error}"), json_wanted="--json" in words)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own usage errors, from whichever click typer uses
            return _usage(error)
        if type(error).__name__ == "Abort":
            return _report(KeyboardInterrupt(), json_wanted="--json" in words)
        if os.environ.get("PLANNER_DEBUG"):
            raise
        sys.stderr.write(f"error: this should not happen: {type(error).__name__}: {error}\nSet PLANNER_DEBUG=1 for the traceback.\n")
        return BUG


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "planner") or "planner"
    sys.stderr.write(f"error: {error.format_message()}\n{path} --help shows how it is used.\n")  # type: ignore[attr-defined]
    return USAGE


def _report(error: BaseException, *, json_wanted: bool) -> int:
    from planner.errors import exit_code
    from planner.report import console

    code = exit_code(error)
    message = str(error) or ("interrupted" if code == INTERRUPTED else type(error).__name__)
    if os.environ.get("PLANNER_DEBUG") and code != INTERRUPTED:
        import traceback

        traceback.print_exception(error)
    if json_wanted:
        body = {"exit_code": code, "message": message}
        if isinstance(error, FileError):
            body["faults"] = [{"position": str(f.position or ""), "path": f.path, "message": f.message} for f in error.faults]  # type: ignore[assignment]
        console.print_json({"error": body})
    for line in message.splitlines():
        sys.stderr.write(f"error: {line}\n" if line == message.splitlines()[0] or isinstance(error, FileError) else f"{line}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
