// Runs a Python file in Pyodide under node: node run.mjs PYODIDE STDLIB SCRIPT PATH …
// PYODIDE: the folder of the npm package; STDLIB: its python_stdlib.zip, or that of the site. The script finds the paths in
// sys.argv, below /host.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [pyodide, stdlib, script, ...paths] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${pyodide}/pyodide.mjs`));
const python = await loadPyodide({ stdLibURL: stdlib });
python.mountNodeFS("/host", "/");
python.pyimport("sys").argv = python.toPy([script, ...paths.map((path) => `/host${path}`)]);
try {
  python.runPython(readFileSync(script, "utf8"), { filename: script });
} catch (error) { // node would print the line of pyodide.asm.mjs, which has a megabyte
  console.error(error.message);
  process.exitCode = 1;
}
