"""Images from real registries, definitions and folders, on real Apptainer."""
