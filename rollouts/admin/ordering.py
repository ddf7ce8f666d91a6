"""Order of the long lists."""

from typing import Final

# Newest rollout first: its index gives the order, and the rows are joined by theirs. Their own
# times of creation have no index, and sorting millions of rows for one page takes seconds.
BY_ROLLOUT: Final = ("-rollout__created_at",)
