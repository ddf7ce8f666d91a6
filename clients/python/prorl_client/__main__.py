"""`python -m prorl_client` is `prorl`."""

import sys

from prorl_client.cli.main import main

sys.exit(main())
