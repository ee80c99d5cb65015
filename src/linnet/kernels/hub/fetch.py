"""Fetching a kernel from the Hub: one process of a node, one build, one revision."""

# The Hub packages ship no stubs, and half of their signatures are untyped.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linnet import __version__
from linnet.kernels import progress
from linnet.kernels.hub.pins import Pin
from linnet.kernels.hub.snapshot import HubError, cached, caches, fitting
from linnet.kernels.implementation import Refusal

WAIT = 600
"""Seconds that a process waits for another one's download."""

ANSWER = 5
"""Seconds for the Hub to answer at all, where HF_HUB_ETAG_TIMEOUT does not say otherwise."""


def fetched(pin: Pin) -> Path | Refusal:
    """The folder of the build that fits, downloaded if no cache has it by then.

    Raises:
        HubError: the Hub can't be reached, or does not have it; or no folder can be written.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{pin.repository} at {pin.revision} is not in {caches()[0]}, and HF_HUB_OFFLINE=1 "
            "forbids fetching it; run `linnet kernels prefetch` once without it"
        )
    with _Locked(pin) as cache:
        found = cached(pin)
        if found is not None:
            return found  # another process has fetched it meanwhile
        chosen = fitting(pin, _builds(pin))
        if isinstance(chosen, Refusal):
            return chosen
        _download(pin, chosen, cache)
        found = cached(pin)
    if found is None:
        raise HubError(
            f"{pin.repository} at {pin.revision} lacks files of {chosen}: a build has a Python "
            "module and a metadata.json"
        )
    return found


class _Locked:
    """Holds the lock on a revision's download, in the first cache that can be written."""

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        self._lock: Any = None

    def __enter__(self) -> Path:
        from filelock import FileLock, Timeout

        name = f"{self._pin.repository.replace('/', '--')}--{self._pin.revision}.lock"
        failed: list[str] = []
        for cache in caches():
            file = cache / ".locks" / "linnet" / name
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._lock = FileLock(file)
                self._lock.acquire(timeout=WAIT)
                return cache
            except Timeout:
                raise HubError(
                    f"another process has been fetching {self._pin.repository} for {WAIT} s; if "
                    f"none is, delete {file}"
                ) from None
            except (OSError, NotImplementedError) as error:  # read-only, or it knows no locks
                failed.append(f"{cache} ({error})")
        raise HubError(
            f"no folder to fetch {self._pin.repository} to can be written: {'; '.join(failed)}; "
            "set HF_HUB_CACHE or LINNET_HOME to one that can"
        )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _builds(pin: Pin) -> list[str]:
    """The names of the builds of a revision: one request, without the client's long retries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url = f"{constants.ENDPOINT}/api/kernels/{pin.repository}/tree/{pin.revision}/build"
    set_here = "HF_HUB_ETAG_TIMEOUT" in os.environ
    timeout = constants.HF_HUB_ETAG_TIMEOUT if set_here else ANSWER

    def ask() -> list[str]:
        answer: Any = get_session().get(
            url, headers=_headers(), params={"recursive": "false"}, timeout=timeout
        )
        hf_raise_for_status(answer)
        return [
            entry["path"].rpartition("/")[2]
            for entry in answer.json()
            if entry["type"] == "directory"
        ]

    return _told(pin, "list the builds of", ask)


def _headers() -> dict[str, str]:
    """Who asks. The client's own function for these asks the Hub first which agents there are."""
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    granted = {} if token is None else {"authorization": f"Bearer {token}"}
    return {"user-agent": f"linnet/{__version__}", **granted}


def _download(pin: Pin, build: str, cache: Path) -> None:
    from huggingface_hub import constants, snapshot_download

    def get() -> None:
        snapshot_download(
            pin.repository,
            repo_type="kernel",
            revision=pin.revision,
            cache_dir=cache,
            allow_patterns=f"build/{build}/*",
            ignore_patterns=["*.pyc", "**/__pycache__/**"],
            library_name="linnet",
            endpoint=constants.ENDPOINT,
            tqdm_class=progress.bars(pin.repository),
        )

    _told(pin, f"download the build {build} of", get)


def _told(pin: Pin, what: str, do: Callable[[], Any]) -> Any:
    """Does it; whatever the client raises, the error says what was wanted and from where.

    Its errors belong to httpx, httpx2 or requests by its version, and few are OSErrors.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.errors import RevisionNotFoundError as NoRevisionError

    began = time.monotonic()
    try:
        return do()
    except NoRevisionError:
        why = f"the repository has no revision {pin.revision}; linnet's pin is out of date"
    except GatedRepoError:
        why = "it is gated: accept its terms on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "there is no such kernel repository, or it is private and HF_TOKEN gives no access"
    except Exception as error:
        text = " ".join(str(error).split())
        why = f"after {time.monotonic() - began:.1f} s, {type(error).__name__}: {text}"
    raise HubError(f"can't {what} {pin.repository} from {constants.ENDPOINT}: {why}")
