"""python -m kvbench.report [results]"""

import sys

from kvbench.report.page import main

sys.exit(main(sys.argv[1:]))
