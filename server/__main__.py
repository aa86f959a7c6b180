"""`python -m kvstore.server` is `kvstore-server`."""

from kvstore.server.cli import main

if __name__ == "__main__":
    main()
