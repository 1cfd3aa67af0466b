"""python -m ddlbench: compose the configuration, run it, record it. Only this file and config/ know Hydra."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib import metadata

STARTED = time.perf_counter()  # before the heavy imports: start-up time counts them

import hydra  # noqa: E402
from hydra.core.utils import setup_globals  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from ddlbench import OLDEST_TORCH, __version__, too_old  # noqa: E402
from ddlbench.command import NO_READER, ended, open_streams  # noqa: E402
from ddlbench.config.choices import conf_dir, targets  # noqa: E402
from ddlbench.config.command_line import check_command_line, help_text  # noqa: E402
from ddlbench.config.compose import configuration, hydra_line  # noqa: E402
from ddlbench.config.keys import shown  # noqa: E402
from ddlbench.config.schema import GROUPS, Config, resolve  # noqa: E402
from ddlbench.errors import SIGNALS, RunError, UserError  # noqa: E402
from ddlbench.progress import tell  # noqa: E402
from ddlbench.ranks.launchers import Launch, detect, hint  # noqa: E402
from ddlbench.texts import discard  # noqa: E402

LONGEST_LINE = 1500


def compose() -> Config | None:
    """The configuration of the command line; None where Hydra only had to print something (--cfg, --info, ...). Hydra
    takes many times as long, so it is asked only where there is one of its options."""
    words = sys.argv[1:]
    if not any(word.startswith("-") for word in words):
        setup_globals()  # ${now:...}
        return configuration(*words)
    check_command_line(words)
    composed: list[DictConfig] = []
    # Hydra would print its own many-lined reports and exit; this makes it raise instead.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(composed.append)()
    if not composed:
        return None
    for group in GROUPS:
        section = composed[0][group]
        target = section.get("_target_") if isinstance(section, DictConfig) else None
        if target is not None and target not in targets(group):  # building it would run foreign code
            raise UserError(f"{group}._target_={shown(target)} is no {group} of ddlbench: choose one with {group}=NAME")
    return resolve(composed[0])


def complain(error: RunError, launch: Launch | None) -> None:
    """Print one line for the user. Rank 0 prints at once. Another rank waits: if the launcher has not ended it by then,
    the mistake is only on that rank (a missing folder on one node)."""
    rank = launch.rank if launch else 0
    if rank:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher's SIGTERM
        time.sleep(3)
    message = " ".join(str(error).split())
    tell(shown(message, LONGEST_LINE), f"ddlbench (rank {rank})" if rank else "ddlbench")


def check_torch() -> None:
    """UserError for a torch that is too old: an import would fail without a word of versions."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH does not say its version
        return
    if too_old(version):
        raise UserError(
            f"this Python has torch {version}, and ddlbench needs {OLDEST_TORCH} or newer: use another environment"
        )


def main() -> int:
    open_streams()
    if {"-h", "--help"} & set(sys.argv[1:]):
        return ended("ddlbench", lambda: print(help_text(sys.argv[1:])))
    if "--version" in sys.argv[1:]:
        return ended("ddlbench", lambda: print(f"ddlbench {__version__}"))
    launch: Launch | None = None
    try:
        launch = detect()
        if launch.world_size > 1:
            # A signal waits for `Supervisor`, which tells the other ranks. The configuration imports torch, whose
            # threads would take the signal unless they inherit this mask.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if (forgotten := hint(launch)) is not None:
            tell(forgotten)
        check_torch()
        config = compose()
        if config is None:
            return 0
        if config.dryrun:  # has no `Supervisor`
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = start(config, launch)
        if code and launch.world_size > 1:
            # Other ranks may be stuck: waiting for threads of the communication library would only hold them up.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    except RunError as error:
        complain(error, launch)
        return error.exit_code
    except (HydraException, OmegaConfBaseException) as error:
        complain(UserError(hydra_line(error)), launch)
        return 2
    except BrokenPipeError:  # of --cfg, for example
        discard(sys.stdout)
        return NO_READER
    except KeyboardInterrupt:  # while nothing takes signals: the configuration is read, a dry run, a rehearsal
        sys.excepthook = lambda *_: None  # no traceback; Python ends by the signal, so that a shell's script ends too
        raise


def start(config: Config, launch: Launch) -> int:
    """Run the configuration; the exit code. Imports what this mode needs only now, so that a mistake in the
    configuration is reported without waiting for it."""
    if config.mode == "rehearsal":
        from ddlbench.rehearsal.rehearse import rehearsal

        return rehearsal(config, launch)
    from ddlbench.run.attempt import run_attempt

    return run_attempt(config, launch, STARTED)


if __name__ == "__main__":
    sys.exit(main())
