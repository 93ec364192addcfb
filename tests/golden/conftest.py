"""Nothing here is a test: pytest need not import what earlier versions wrote."""

collect_ignore_glob = ["job.py", "version-*"]
