import sys

print("nothing to see", sys.argv[1:])
