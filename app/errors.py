"""Every error the service raises on purpose. This file knows no HTTP.

    DragomanError
    ├── InvalidRequest          the caller's data is wrong
    │   ├── InvalidOption       an option is out of range or contradicts another
    │   ├── UnsupportedPair     no bundle translates this language pair
    │   └── RequestTooLarge     the request exceeds a limit of this service
    ├── Unavailable             right request, wrong moment; may be repeated
    │   ├── QueueFull           admission refused: too many tokens are waiting
    │   ├── ShuttingDown        the service is draining
    │   ├── WorkerFailed        the step that held this entry raised
    │   └── ReloadInProgress    the bundles are being loaded anew already
    ├── RequestCancelled        the client left, or the caller cancelled
    ├── DeadlineExceeded        the time allowed for the request passed first
    ├── BundleError             a bundle cannot be used
    │   ├── BundleNotFound      no manifest where one was expected
    │   ├── BundleCorrupt       a file is missing, truncated, altered or leaves the folder
    │   └── BundleUnsupported   format version or content that this version cannot run
    ├── DeviceUnavailable       the GPU that was asked for cannot be used
    ├── ReloadFailed            the bundles could not be loaded anew, for no fault of a bundle's
    ├── CheckpointError         a checkpoint to be imported is damaged or of an unknown kind
    ├── TrainingFailed          a training run cannot go on
    ├── VerificationFailed      an export does not reproduce its reference
    └── SettingsError           a setting is unknown, ill-typed or out of range

Each class has a stable ``code`` (part of the public API) and says whether the same call may
succeed when repeated (``retryable``). A message names the value, the limit and the remedy; it
never contains the caller's text.
"""

from __future__ import annotations

from typing import ClassVar


class DragomanError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        code: stable machine-readable name.
        retryable: whether repeating the same call later may succeed.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        """Store the sentence shown to the caller."""
        super().__init__(message)
        self.message = message


class InvalidRequest(DragomanError):
    """The caller's data is wrong; repeating it will not help."""

    code = "invalid_request"


class InvalidOption(InvalidRequest):
    """Options contradict one another or the bundle, or a phrase or prefix cannot be honoured."""

    code = "invalid_option"


class UnsupportedPair(InvalidRequest):
    """No loaded bundle translates this language pair."""

    code = "unsupported_pair"


class RequestTooLarge(InvalidRequest):
    """The request exceeds a size limit of this service."""

    code = "request_too_large"


class Unavailable(DragomanError):
    """The request is right but cannot be served now."""

    code = "unavailable"
    retryable = True


class QueueFull(Unavailable):
    """Admission was refused because too many tokens are waiting.

    Attributes:
        retry_after_s: estimated seconds until the queue has room.
    """

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        """Store the message and the estimate for a Retry-After header."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(Unavailable):
    """The service is draining and takes no new work."""

    code = "shutting_down"


class WorkerFailed(Unavailable):
    """The decoding step that held this entry raised; the entry was not translated."""

    code = "worker_failed"


class ReloadInProgress(Unavailable):
    """The bundles are being loaded anew already; ask again when that is done."""

    code = "reload_in_progress"


class RequestCancelled(DragomanError):
    """The client left or the caller cancelled before the answer was ready."""

    code = "cancelled"


class DeadlineExceeded(DragomanError):
    """The time allowed for the request passed before it was translated; nothing of it runs any more.

    Not retryable: the same request under the same load meets the same end.
    """

    code = "deadline_exceeded"


class BundleError(DragomanError):
    """A bundle cannot be used."""

    code = "bundle"


class BundleNotFound(BundleError):
    """There is no bundle where one was expected."""

    code = "bundle_not_found"


class BundleCorrupt(BundleError):
    """A bundle's file is missing, truncated, altered, or points outside the folder."""

    code = "bundle_corrupt"


class BundleUnsupported(BundleError):
    """The bundle is well-formed but this version cannot run it."""

    code = "bundle_unsupported"


class DeviceUnavailable(DragomanError):
    """A GPU that is to be used cannot be: driver, library or the GPU itself is missing, too old or at fault.

    Attributes:
        has_gpu: whether there seems to be a GPU at all.
        brief: what is the matter, without a remedy, for those who never asked for a GPU.
    """

    code = "device_unavailable"

    def __init__(self, message: str, *, has_gpu: bool = True, brief: str = "") -> None:
        """Store the sentence, and whether there is something to be mended."""
        super().__init__(message)
        self.has_gpu = has_gpu
        self.brief = brief or message


class ReloadFailed(DragomanError):
    """The bundles could not be loaded anew, by no fault of a bundle; the models that ran before go on."""

    code = "reload_failed"


class CheckpointError(DragomanError):
    """A checkpoint to be imported is damaged, hostile or of an unknown kind."""

    code = "checkpoint"


class TrainingFailed(DragomanError):
    """A training run cannot go on as it is."""

    code = "training_failed"


class VerificationFailed(DragomanError):
    """An exported bundle does not reproduce the model it was made from."""

    code = "verification_failed"


class SettingsError(DragomanError):
    """A setting is unknown, ill-typed or out of range."""

    code = "settings"
