"""Read the logs of test runners: test name to status."""
