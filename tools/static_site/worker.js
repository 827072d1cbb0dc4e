// Python in a web worker: loads Pyodide and fitgpt, then answers the questions of ask.js.
import { loadPyodide } from "./pyodide.mjs";

const here = new URL("./", import.meta.url).href;
const fitgpt = fetch(`${here}fitgpt.zip`);

// WebAssembly is shipped compressed, because not every static host compresses it: Pyodide fetches the unpacked file.
const fetched = fetch;
globalThis.fetch = async (address, options) => {
  if (!String(address).endsWith(".wasm")) return fetched(address, options);
  const { body } = await fetched(`${address}.gzip`);
  return new Response(body.pipeThrough(new DecompressionStream("gzip")), { headers: { "Content-Type": "application/wasm" } });
};

const python = await loadPyodide({ indexURL: here });
python.unpackArchive(await (await fitgpt).arrayBuffer(), "zip", { extractDir: "/fitgpt" });
python.runPython("import sys; sys.path.append('/fitgpt')");
const api = python.pyimport("fitgpt.web.api");
onmessage = ({ data: { name, query, text } }) => postMessage(api.answer_json(api.ApiRequest(name, query ?? undefined, text ?? "")));
postMessage("ready");
