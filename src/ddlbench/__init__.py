"""ddlbench: which way of training in parallel is fastest, leanest and still learns?"""

__version__ = "0.1.0"
OLDEST_TORCH = "2.11"  # as pyproject.toml says; `pip install --no-deps` checks no version


def too_old(torch_version: str) -> bool:
    """Whether this torch is older than the code expects."""
    version, oldest = ([int(part) for part in text.split(".")[:2]] for text in (torch_version, OLDEST_TORCH))
    return version < oldest
