// Measures the console in Chromium; prints one object of JSON. Called by benchmarks/console/__main__.py, which says what the figures are.
//
//   node benchmarks/console/measure.mjs '{"url": "…", "tokens": {…}, "large": "projects/…", "seconds": 600, "rows": 100000}'

import { chromium } from "@playwright/test";

const { url, tokens, large, seconds, rows } = JSON.parse(process.argv[2]);
const STORE = "fulmen.store.v1.RolloutService";
const LIST = "projects/default/rollouts";
const BATCH = 1000;
const UPDATES_PER_S = 10;
const COMMITS = 30;
// Until the list has the 200 new rows that it keeps above the loaded ones, and code is compiled.
const WARM_SECONDS = 60;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const quantile = (values, q) => [...values].sort((a, b) => a - b)[Math.min(values.length - 1, Math.floor(values.length * q))];

async function call(rpc, request) {
  const answer = await fetch(`${url}/${STORE}/${rpc}`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${tokens.admin}` },
    body: JSON.stringify(request),
  });
  if (!answer.ok) throw new Error(`${rpc}: ${await answer.text()}`);
  return answer.json();
}

// Nobody has this label: the rollouts wait, and nothing else happens to them.
const rollout = (text) => ({
  project: "projects/default",
  input: Buffer.from(JSON.stringify({ question: text })).toString("base64"),
  requiredLabels: { measured: "never" },
});
const create = (count, text) =>
  call("BatchCreateRollouts", { rollouts: Array.from({ length: count }, (_, index) => rollout(`${text} ${index}`)) });

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-dev-shm-usage", "--enable-precise-memory-info"],
});

async function opened() {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
  const page = await context.newPage();
  await page.request.post(`${url}/session`, { data: { token: tokens.client } });
  await page.addInitScript(() => {
    window.long = [];
    new PerformanceObserver((list) => window.long.push(...list.getEntries().map(({ duration }) => duration))).observe({
      type: "longtask",
      buffered: true,
    });
  });
  return { page, cdp: await context.newCDPSession(page) };
}

async function heap(cdp) {
  await cdp.send("HeapProfiler.collectGarbage");
  return (await cdp.send("Runtime.getHeapUsage")).usedSize;
}

async function script(cdp) {
  const { metrics } = await cdp.send("Performance.getMetrics");
  return metrics.find(({ name }) => name === "ScriptDuration").value * 1000;
}

async function firstPage() {
  const { page, cdp } = await opened();
  let bytes = 0;
  const scripts = new Set();
  await cdp.send("Network.enable");
  cdp.on("Network.responseReceived", ({ requestId, type }) => type === "Script" && scripts.add(requestId));
  cdp.on("Network.loadingFinished", ({ requestId, encodedDataLength }) => {
    if (scripts.has(requestId)) bytes += encodedDataLength;
  });
  await page.goto(`${url}/projects/default`);
  await page.getByText("Queued", { exact: true }).waitFor();
  const paint = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime);
  const content = await page.evaluate(() => performance.now());
  await page.context().close();
  return { script_bytes: bytes, first_paint_ms: paint, content_ms: content };
}

async function commits(page) {
  const found = [];
  for (let number = 0; number < COMMITS; number++) {
    const text = `seen ${number} ${Math.random()}`;
    await create(1, text);
    const began = Date.now();
    await page.getByText(text).first().waitFor({ timeout: 30_000 });
    found.push(Date.now() - began);
    await pause(300);
  }
  return { median_ms: quantile(found, 0.5), p95_ms: quantile(found, 0.95) };
}

async function updates() {
  const { page, cdp } = await opened();
  await page.goto(`${url}/${LIST}`);
  await page.getByRole("heading", { level: 1 }).waitFor();
  await pause(10_000);
  const seen = await commits(page);
  let sent = 0;
  const change = async (lastsS) => {
    const ends = Date.now() + lastsS * 1000;
    while (Date.now() < ends) {
      const tick = Date.now();
      const { rollouts } = await create(UPDATES_PER_S / 2, `update ${sent}`);
      await call("CancelRollouts", { names: rollouts.map(({ name }) => name) });
      sent += UPDATES_PER_S;
      await pause(Math.max(0, 1000 - (Date.now() - tick)));
    }
    return heap(cdp);
  };
  const heapFresh = await heap(cdp);
  const heapBefore = await change(WARM_SECONDS);
  sent = 0;
  await page.evaluate(() => (window.long.length = 0));
  // A leak grows in each half; a buffer that fills does not.
  const heapMiddle = await change(seconds / 2);
  const heapAfter = await change(seconds / 2);
  const heaps = { heap_fresh: heapFresh, heap_before: heapBefore, heap_middle: heapMiddle, heap_after: heapAfter };
  const long = await page.evaluate(() => window.long.filter((each) => each > 50));
  await page.context().close();
  return { seconds, updates: sent, ...heaps, long_tasks: long.length, commit: seen };
}

async function scrolling() {
  for (let left = rows; left > 0; left -= BATCH) await create(Math.min(BATCH, left), "row");
  const { page, cdp } = await opened();
  await cdp.send("Performance.enable");
  await page.goto(`${url}/${LIST}`);
  const box = page.getByRole("group", { name: /ollouts/ }).first();
  await box.waitFor();
  await pause(3_000);
  const loaded = async () => Number(await page.getByRole("table").first().getAttribute("aria-rowcount")) || 0;
  const until = Date.now() + 300_000;
  while ((await loaded()) < rows && Date.now() < until) {
    await box.evaluate((element) => (element.scrollTop = element.scrollHeight));
    await pause(50);
  }
  const count = await loaded();
  const frames = [];
  const times = [];
  for (let step = 0; step < 300; step++) {
    const before = await script(cdp);
    times.push(
      await box.evaluate(
        (element, to) =>
          new Promise((resolve) => {
            const began = performance.now();
            element.scrollTop = to;
            requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now() - began)));
          }),
        step * 400,
      ),
    );
    frames.push((await script(cdp)) - before);
  }
  await page.context().close();
  return { rows: count, script_ms_p95: quantile(frames, 0.95), two_frames_ms_p95: quantile(times, 0.95) };
}

async function largeTrace() {
  const { page } = await opened();
  await page.addInitScript(() => {
    const observer = new MutationObserver(() => {
      if (!document.querySelector("[role=treeitem]")) return;
      observer.disconnect();
      requestAnimationFrame(() => (window.firstViewMs = performance.now()));
    });
    observer.observe(document, { subtree: true, childList: true });
  });
  await page.goto(`${url}/${large}?view=waterfall`);
  const firstMs = await (await page.waitForFunction(() => window.firstViewMs)).jsonValue();
  // All have come: only then is the scrolling that of ten thousand.
  await page.getByText("10,000 spans in").waitFor();
  const wholeMs = await page.evaluate(() => performance.now());
  await page.evaluate(() => (window.long.length = 0));
  const tree = page.getByRole("tree", { name: "Spans" });
  await tree.focus();
  for (let step = 0; step < 60; step++) await page.keyboard.press("PageDown");
  for (let step = 0; step < 20; step++) await page.keyboard.press("+");
  const long = await page.evaluate(() => window.long.filter((each) => each > 50));
  await page.context().close();
  return { spans: 10_000, first_view_ms: firstMs, whole_ms: wholeMs, long_tasks: long.length, longest_ms: Math.max(0, ...long) };
}

try {
  const found = { first_page: await firstPage(), trace: await largeTrace() };
  found.live = await updates();
  found.scroll = await scrolling();
  process.stdout.write(`${JSON.stringify(found)}\n`);
} finally {
  await browser.close();
}
