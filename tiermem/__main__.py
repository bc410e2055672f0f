from __future__ import annotations

from tiermem.cli import main

if __name__ == "__main__":
    main()
