"""Imports every module of the installed packages: a file or a dependency that the wheel lacks shows here."""

import importlib
import pkgutil
from pathlib import Path

PACKAGES = ("rorqual.cache", "rorqual.model", "rorqual.serve", "rorqual.sharding")


def main() -> None:
    num_modules = 0
    for name in PACKAGES:
        package = importlib.import_module(name)
        for folder in package.__path__:
            # An editable installation would prove nothing about the wheel.
            assert Path(folder).parts[-3] == "site-packages", f"{name} comes from {folder}, not from the wheel"
        for module in pkgutil.walk_packages(package.__path__, name + "."):
            importlib.import_module(module.name)
            num_modules += 1
    print(f"imports: {len(PACKAGES)} packages and {num_modules} modules below them")


if __name__ == "__main__":
    main()
