"""What `reshard inspect` says of the bucket in which a checkpoint is: unfinished uploads, and rules that endanger it.

A bucket that does not answer is an error after 10 seconds, while loads try for a minute.

What the service does not tell, or does not permit to ask, is a note.
"""

from __future__ import annotations

import datetime as dt
import errno
import shlex
import signal
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from reshard._core import RuleAction
from reshard.commit import roots
from reshard.errors import ReshardError, StorageError
from reshard.storage.location import locate
from reshard.storage.remote import RemoteStore
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard import _core
    from reshard.storage.location import Location

T = TypeVar("T")

_WAIT_S = 20.0  # for all requests together
_ANSWER_S = 10.0
_EXPORTS = ("hf", "integrated")  # the ends of the names of folders beside a root, see `verbs.integrate`

_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")  # which S3 does not read until a copy is restored


@dataclass(frozen=True)
class Upload:
    """An upload that was not completed.

    Attributes:
        key: the name of the object in the bucket.
        upload_id: which upload of the object it is; empty in Azure.
        begun: when it was begun, as the service says it; None if it does not.
        age_s: seconds since then; None if that is not known.
        n_bytes: the bytes of its parts; None if they are not known.
        end_with: the command that removes it; None if the service does so by itself.
    """

    key: str
    upload_id: str
    begun: str | None
    age_s: float | None
    n_bytes: int | None
    end_with: str | None


@dataclass(frozen=True)
class BucketFacts:
    """What is known of a bucket, for a run in it.

    Attributes:
        uploads: unfinished uploads of the run, oldest first.
        dangers: what rules of the bucket do to objects of the run.
        notes: what is not known, and what is missing.
    """

    uploads: list[Upload]
    dangers: list[str]
    notes: list[str]


def check_answers(path: str) -> None:
    """Refuse a bucket that does not answer, before each of several requests is tried for a minute.

    Args:
        path: a checkpoint; a local one is not looked at. A thread that is not the main one waits as loads do.

    Raises:
        StorageError: the service does not answer within 10 seconds, or it cannot be reached.
    """
    place = locate(path)
    store = place.store
    if not isinstance(store, RemoteStore) or threading.current_thread() is not threading.main_thread():
        return
    endpoint = store.endpoint
    which = "the endpoint of the service" if endpoint is None or "@" in endpoint else f"the endpoint {show(endpoint)}"

    def end(_number: int, _frame: object) -> None:
        raise StorageError(
            f"looking at {place}: the service has not answered within {_ANSWER_S:g} s",
            path=str(place),
            errno=errno.ETIMEDOUT,
            hint=f"check the network and {which}; try again if the service is slow",
        )

    before = signal.signal(signal.SIGALRM, end)
    rest_s, _ = signal.setitimer(signal.ITIMER_REAL, _ANSWER_S)
    try:
        place.found()
    except StorageError as error:
        if error.errno != errno.EACCES:  # what is read can be permitted all the same
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, rest_s)


def bucket_facts(place: Location, *, is_root: bool) -> BucketFacts | None:
    """Ask the bucket of a run; None if it is in none.

    Args:
        place: the run, one of its iterations, or a file.
        is_root: whether it is a run.
    """
    store = place.store
    if not isinstance(store, RemoteStore) or store.is_read_only:
        return None
    if not is_root and _is_in_log(place):
        place, is_root = place.parent, True
    until = time.monotonic() + _WAIT_S
    notes: list[str] = []
    of_rules: list[str] = []
    scheme, _, rest = place.path.partition("://")
    bucket, _, key = rest.partition("/")
    rules = _asked(lambda: store.lifecycle_rules(place.path, wait_s=_WAIT_S / 2), "lifecycle rules", of_rules)
    if not of_rules and not any(ends_uploads(one, key) for one in rules):
        of_rules.append(
            "no rule of the bucket removes unfinished uploads: AbortIncompleteMultipartUpload does, see the guide "
            "`Buckets`"
        )
    exports = [f"{key}_{suffix}" for suffix in _EXPORTS] if is_root and key else []
    dangers = [_danger(one, key, exports) for one in rules]
    folders = [place.path, *(f"{scheme}://{bucket}/{export}" for export in exports)]

    def unfinished() -> tuple[list[_core.UnfinishedUpload], str | None]:
        wait_s = max(0.0, until - time.monotonic())
        return store.unfinished_uploads(folders, is_file=not is_root and place.is_file(), wait_s=wait_s)

    begun = _asked(unfinished, "unfinished uploads", notes)
    endpoint = store.endpoint
    uploads = [_upload(one, scheme, bucket, endpoint) for one in sorted(begun, key=lambda one: one.begun)]
    return BucketFacts(uploads, [text for text in dangers if text is not None], notes + of_rules)


def _is_in_log(place: Location) -> bool:
    """Whether a folder is an iteration of a root that is a log, in which its files are in another folder."""
    if roots.parse_iteration_folder(place.name) is None:
        return False
    try:
        return roots.known_facts(place.parent) is not None
    except ReshardError:  # the credentials may permit the iteration alone
        return False


def _danger(rule: _core.LifecycleRule, key: str, exports: Sequence[str]) -> str | None:
    """What a rule does to a run, or else to its exports."""
    found = danger_of(rule, key)
    of_exports = (text for export in exports if (text := danger_of(rule, export, "exports of the run lose files")))
    return found or next(of_exports, None)


def _asked(ask: Callable[[], tuple[list[T], str | None]], what: str, notes: list[str]) -> list[T]:
    try:
        found, reason = ask()
    except ReshardError as error:
        found, reason = [], error.message
    if reason is not None:
        notes.append(f"{f'not all {what} are' if found else f'{what} are not'} known: {reason}")
    return found


def _upload(one: _core.UnfinishedUpload, scheme: str, bucket: str, endpoint: str | None) -> Upload:
    age_s: float | None = None
    try:
        begun = dt.datetime.fromisoformat(one.begun)
        age_s = (dt.datetime.now(dt.UTC) - (begun if begun.tzinfo else begun.replace(tzinfo=dt.UTC))).total_seconds()
    except (ValueError, OverflowError):
        pass
    ended = _end_with(one, scheme, bucket, endpoint)
    return Upload(one.key, one.upload_id, one.begun or None, age_s, one.n_bytes, ended)


def _end_with(one: _core.UnfinishedUpload, scheme: str, bucket: str, endpoint: str | None) -> str | None:
    if scheme == "az":
        return None
    if scheme == "gs":
        name = urllib.parse.quote(one.key)
        base = (endpoint or "https://storage.googleapis.com").rstrip("/")
        url = f"{base}/{bucket}/{name}?uploadId={urllib.parse.quote(one.upload_id, safe='')}"
        header = '"Authorization: Bearer $(gcloud auth print-access-token)"'
        return f"curl -X DELETE -H {header} {shlex.quote(url)}"
    names = ["--bucket", bucket, "--key", one.key, "--upload-id", one.upload_id]
    # A name and a password before `@` are not shown.
    service = [] if endpoint is None or "@" in endpoint else ["--endpoint-url", endpoint]
    return shlex.join(["aws", "s3api", "abort-multipart-upload", *service, *names])


def _meets(rule: _core.LifecycleRule, key: str) -> bool:
    """Whether a rule is about an object of a run: it, or what is below it."""
    below = f"{key}/" if key else ""
    return any(below.startswith(prefix) or prefix.startswith(below) or key == prefix for prefix in rule.prefixes)


def ends_uploads(rule: _core.LifecycleRule, key: str) -> bool:
    """Whether a rule removes the unfinished uploads of a whole run."""
    below = f"{key}/" if key else ""
    is_of_all = any(below.startswith(prefix) for prefix in rule.prefixes) and not rule.is_narrower
    return rule.action is RuleAction.END_UPLOADS and is_of_all


def danger_of(
    rule: _core.LifecycleRule, key: str, loses: str = "the run loses its log and its iterations"
) -> str | None:
    """What a rule does to a run, as a sentence; None: nothing.

    Args:
        rule: of its bucket.
        key: the name of the run in the bucket.
        loses: what happens if its objects are removed.
    """
    if rule.action is RuleAction.END_UPLOADS or not _meets(rule, key):
        return None
    name = f"the rule `{rule.name}`" if rule.name else "a rule"
    which = _which(rule.prefixes)
    if rule.is_narrower:
        which += " that meet other conditions of it"
    when = f" {rule.when}" if rule.when else ""
    if rule.action is RuleAction.EXPIRE:
        return f"{name} of the bucket removes objects {which}{when}: {loses}"
    reads = ", where they cannot be read before they are restored" if rule.storage_class in _ARCHIVES else ""
    cost = "" if reads else ", where reading and removing them early costs more"
    return f"{name} of the bucket moves objects {which}{when} to {rule.storage_class or 'another class'}{reads}{cost}"


def _which(prefixes: Sequence[str]) -> str:
    if not all(prefixes):
        return "of the whole bucket"
    return f"whose names begin with {' or '.join(f'`{prefix}`' for prefix in prefixes)}"
