"""Maps the root folders below the import name `kvstore`; everything static is in pyproject.toml.

The links in kvstore/ (server, compression, bindings) serve whatever reads the tree: editable installs,
type checkers, tests. This mapping serves wheels and sdists. Both are needed.
"""

from setuptools import find_namespace_packages, setup

COMPONENTS = ("compression", "server", "bindings")

packages = ["kvstore"]
package_dir = {"kvstore": "kvstore"}
for component in COMPONENTS:
    name = f"kvstore.{component}"
    packages += [name, *(f"{name}.{inner}" for inner in find_namespace_packages(component) if inner != "__pycache__")]
    package_dir[name] = component

setup(packages=packages, package_dir=package_dir)
