"""ddlbench: which way of training in parallel is fastest, leanest and still learns?"""

__version__ = "0.1.0"
OLDEST_TORCH = (2, 11)  # as pyproject.toml says; `pip install --no-deps` checks no version
