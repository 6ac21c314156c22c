"""What hatchling adds to a wheel: the course's notebooks and clusters/, next to the package."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Notebooks(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "editable":
            return  # the checkout's own are used
        for folder in ("lessons", "exercises", "solutions", "clusters"):
            for path in Path(self.root, folder).rglob("*"):
                name = path.relative_to(self.root)
                if path.is_file() and not any(part[0] in "._" for part in name.parts):
                    target = Path("ddp_course/cli/course", name)
                    build_data["force_include"][str(path)] = target.as_posix()
