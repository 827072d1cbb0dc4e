// The transport of the static site: Python answers in two web workers. It replaces src/fitgpt/web/static/ask.js.
export const SERVED = false;

const QUICK = ["form", "plan", "step"]; // asked while a slider moves: slow answers must not delay them
const precomputed = fetch("static/answers.json").then((response) => response.json());

// A worker that answers one question at a time. An aborted question that still waits is never asked.
class Lane {
  #python = null; // a promise of a worker that is ready
  #last = Promise.resolve();

  start() {
    return this.#python ??= new Promise((resolve, reject) => {
      const python = new Worker("python/worker.js", { type: "module" });
      python.onmessage = () => resolve(python);
      python.onerror = (error) => this.#failed(python, error, reject);
    });
  }

  async ask(question, signal) {
    const before = this.#last, { promise, resolve: done } = Promise.withResolvers();
    this.#last = promise;
    await before;
    try {
      signal?.throwIfAborted();
      const python = await this.start();
      const answer = await new Promise((resolve, reject) => {
        python.onmessage = ({ data }) => resolve(JSON.parse(data));
        python.onerror = (error) => this.#failed(python, error, reject);
        python.postMessage(question);
      });
      signal?.throwIfAborted();
      return answer;
    } finally {
      done();
    }
  }

  #failed(python, { message }, reject) { // the next question starts another worker
    python.terminate();
    this.#python = null;
    reject(new Error(message));
  }
}

const quick = new Lane(), slow = new Lane();

// Two Pythons that start at the same time would delay each other, and the first verdict. When both have started, the browser
// has all files, and the service worker keeps them for use without a network.
quick.start().then(() => slow.start()).then(() => navigator.serviceWorker?.register("service_worker.js")).catch(() => {});

// The answer to a question of web/api.py. `text`: of a paste, whose query is null without a plan.
export async function ask(name, { query = "", text, signal }) {
  const known = (await precomputed)[query ? `${name}?${query}` : name];
  if (known) return known;
  if (QUICK.includes(name)) return quick.ask({ name, query, text }, signal);
  await quick.start();
  return slow.ask({ name, query, text }, signal);
}
