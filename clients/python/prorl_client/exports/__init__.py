"""Files of trajectories: JSONL, Parquet, ATIF."""

from prorl_client.exports.base import Export, open_export

__all__ = ["Export", "open_export"]
