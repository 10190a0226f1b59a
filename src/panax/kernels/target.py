"""The platform that a program is compiled for: an argument of the kernels, never the attached device's."""

from panax.core.errors import nearest

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


def canonical_platform(platform: str) -> str:
    """The platform's one name here: "cpu", "gpu" or "tpu".

    >>> canonical_platform("cuda")
    'gpu'
    """
    if platform not in _PLATFORMS:
        raise ValueError(f"platform={platform!r}: {nearest(platform, _PLATFORMS)}")
    return _PLATFORMS[platform]
