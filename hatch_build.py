"""What a wheel of this package has beyond its files: the notebooks without outputs, and a README for an index."""

import json
import re
import shutil
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class NotebooksWithoutOutputs(BuildHookInterface):
    """Writes them into a temporary folder, from where the wheel takes them: outputs are megabytes of figures, and the
    reader makes new ones. `twell-lab course` makes the student's edition of them. An editable install reads the
    checkout's."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version != "standard":
            return
        self.folder = Path(tempfile.mkdtemp())
        for path in sorted(Path(self.root, "notebooks").glob("*.ipynb")):
            notebook = json.loads(path.read_text(encoding="utf-8"))
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    cell |= {"outputs": [], "execution_count": None}
            bare = self.folder / path.name
            bare.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            build_data["force_include"][str(bare)] = f"twell_lab/notebooks/{path.name}"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        if version == "standard":
            shutil.rmtree(self.folder, ignore_errors=True)


class ReadmeForAnIndex(MetadataHookInterface):
    """The README without pictures of the checkout, nor what stands below them, and with the words alone of links into
    it: on a package's page they would lead nowhere."""

    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*(?:\*[^*]*\*\n*)?", "", text)
        text = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)#][^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
