// Keeps the site's files for use without a network. build.py writes the list of files, and a name that changes with them.
const PREFIX = "fitgpt-", CACHE = `${PREFIX}VERSION`, FILES = [];

self.addEventListener("install", (event) => {
  self.skipWaiting();
  const requests = FILES.map((file) => new Request(file, { cache: "no-cache" })); // a file of an earlier version is not taken
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(requests)));
});

self.addEventListener("activate", (event) => event.waitUntil(caches.keys().then((names) => // other sites may share the host
  Promise.all(names.filter((name) => name.startsWith(PREFIX) && name !== CACHE).map((name) => caches.delete(name))))));

self.addEventListener("fetch", (event) => event.respondWith(caches.open(CACHE)
  .then((cache) => cache.match(event.request, { ignoreSearch: true })).then((found) => found ?? fetch(event.request))));
