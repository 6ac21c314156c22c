import sys

from tries import main

sys.exit(main(sys.argv[1:]))
