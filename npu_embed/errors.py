"""The exception tree: who must act decides the class.

NpuEmbedError
├── BundleError            the bundle is wrong: re-export or download it again
├── InputError             the caller's argument is wrong (also a ValueError)
│   └── InputTypeError     its type is wrong (also a TypeError)
├── DeviceError            the machine: driver, NPU, kernel
│   ├── DeviceBad          it has failed twice in a row, and is not used until it is released
│   ├── NoFreeContext      no hardware context to be had
│   └── RunFailed          a kernel run did not complete, or gave other results than known ones
├── FetchError             a checkpoint could not be fetched: network, pip, cache folder
├── OutputError            a result could not be written: folder, permissions, room
└── SettingError           an NPU_EMBED_* variable or an option is wrong

Every message reads `where: found, wanted; what to do`.
"""


class NpuEmbedError(Exception):
    """The root of every error this package raises on purpose."""


class BundleError(NpuEmbedError):
    """A bundle or checkpoint file is missing, damaged or contradicts itself."""


class InputError(NpuEmbedError, ValueError):
    """An argument of the caller has a value that cannot be embedded or used."""


class InputTypeError(InputError, TypeError):
    """An argument of the caller has a type that cannot be embedded or used."""


class DeviceError(NpuEmbedError):
    """The NPU, its driver or the emulated device refused or failed."""


class DeviceBad(DeviceError):
    """The device failed a pack twice, the second time on new contexts; release() forgives it."""


class NoFreeContext(DeviceError):
    """No hardware context could be created, even after dropping all of ours."""


class RunFailed(DeviceError):
    """A kernel run did not end in COMPLETED or in time, or its results are known to be wrong."""


class FetchError(NpuEmbedError):
    """A checkpoint could not be fetched or unpacked into the cache folder."""


class OutputError(NpuEmbedError):
    """A result could not be written: no such folder, no permission, no room."""


class SettingError(NpuEmbedError):
    """A setting (environment variable or option) has a value that is not accepted."""
