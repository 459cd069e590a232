// The right part of the page: what the engine does, asked for twice a second while somebody sees it.

import { ApiError, getJson, keys } from "./api.js";
import { BlockMap, blocksByOwner, countBlocks, expandRuns, Hues } from "./block_map.js";
import { RateChart } from "./rate_chart.js";

const INTERVAL_MS = 500;
const RETRY_MS = 3000;
const MAX_ROWS = 50;
const RATE_WINDOW_S = 2;

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");

export class EngineView {
  constructor() {
    this.hues = new Hues();
    this.map = new BlockMap(byId("block-map"), byId("block-tip"));
    this.chart = new RateChart(byId("rate-chart"));
    this.paused = false;
    this.onScreen = false;
    this.refused = false;
    this.timer = null;
    this.asking = null;
    this.samples = [];
    this.listen();
  }

  listen() {
    byId("pause").addEventListener("click", () => {
      this.paused = !this.paused;
      byId("pause").setAttribute("aria-pressed", String(this.paused));
      this.wake();
    });
    document.addEventListener("visibilitychange", () => this.wake());
    new IntersectionObserver(([entry]) => {
      this.onScreen = entry.isIntersecting;
      this.wake();
    }).observe(byId("engine"));
    keys.addEventListener("change", () => {
      this.refused = false;
      this.wake();
    });
  }

  get watched() {
    return this.onScreen && document.visibilityState === "visible" && !this.paused && !this.refused;
  }

  /** Ask now if somebody sees it, and no more if nobody does. */
  wake() {
    clearTimeout(this.timer);
    this.asking?.abort();
    this.asking = null;
    if (this.watched) this.ask();
    else this.say(this.paused ? "paused" : this.refused ? "needs a key" : "");
  }

  say(text) {
    if (byId("engine-state").textContent !== text) byId("engine-state").textContent = text;
  }

  async ask() {
    const asking = (this.asking = new AbortController());
    let wait = INTERVAL_MS;
    try {
      const found = await getJson("engine/snapshot", asking.signal);
      if (asking.signal.aborted) return;
      this.show(found);
      this.say("live");
    } catch (error) {
      if (asking.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      this.refused = error.status === 401;
      this.say(this.refused ? "needs a key" : error.message);
      wait = RETRY_MS;
    }
    if (this.watched) this.timer = setTimeout(() => this.ask(), wait);
  }

  show({ time, stats, requests, blocks: runs, block_size: blockSize, block_bytes: blockBytes }) {
    const rates = this.measure(time, stats);
    const blocks = expandRuns(runs);
    this.showNumbers(stats, rates);
    const used = stats.num_gpu_blocks - stats.num_free_gpu_blocks;
    const [usedBytes, bytes] = [used, stats.num_gpu_blocks].map((count) => formatBytes(count * blockBytes));
    setText(byId("pool"), `${usedBytes} of ${bytes} in use; a block holds ${blockSize} tokens`);
    const hues = this.hues.of(requests);
    this.map.update(blocks, requests, hues);
    this.showLegend(countBlocks(blocks));
    showRequests(requests, hues, blocksByOwner(blocks, requests.length));
  }

  /** Tokens a second over the last moments. */
  measure(time, { prompt_tokens: prompt, generation_tokens: generation }) {
    let newest = this.samples.at(-1);
    if (newest && (time < newest.time || generation < newest.generation)) {
      // Another engine, which counts from 0.
      newest = undefined;
      this.chart.clear();
    }
    // Where nobody looked, nothing is known.
    if (!newest || time - newest.time > 2 * RATE_WINDOW_S) this.samples = [];
    const isNew = !newest || time > newest.time;
    if (isNew) this.samples.push({ time, prompt, generation });
    while (this.samples.length > 2 && this.samples[1].time <= time - RATE_WINDOW_S) this.samples.shift();
    const oldest = this.samples[0];
    const seconds = time - oldest.time;
    if (seconds <= 0) return { prompt: 0, generation: 0 };
    const rates = {
      prompt: (prompt - oldest.prompt) / seconds,
      generation: (generation - oldest.generation) / seconds,
    };
    if (isNew) this.chart.add(time, rates.generation);
    return rates;
  }

  showNumbers(stats, rates) {
    const used = stats.num_gpu_blocks - stats.num_free_gpu_blocks;
    const usedHost = stats.num_cpu_blocks - stats.num_free_cpu_blocks;
    const numbers = [
      ["Running", whole.format(stats.num_running)],
      ["Waiting", whole.format(stats.num_waiting)],
      ["Swapped", whole.format(stats.num_swapped)],
      ["Output tok/s", whole.format(Math.round(rates.generation))],
      ["Prompt tok/s", whole.format(Math.round(rates.prompt))],
      ["Cache hits", percent(stats.prefix_hits, stats.prefix_queries)],
      ["Preemptions", whole.format(stats.num_recomputations + stats.num_swap_outs)],
      ["KV in use", percent(used, stats.num_gpu_blocks)],
      ["Host KV", stats.num_cpu_blocks ? percent(usedHost, stats.num_cpu_blocks) : "none"],
    ];
    setRows(byId("numbers"), numbers, newNumber, (row, [, value]) => setText(row.lastElementChild, value));
  }

  showLegend(counts) {
    const parts = [
      ["held once", "single", counts.single],
      ["shared", "shared", counts.shared],
      ["free, cached", "cached", counts.cached],
      ["free", "free", counts.free],
    ];
    setRows(byId("legend"), parts, newLegendEntry, (row, [, , count]) => setText(row.children[1], whole.format(count)));
    const total = counts.single + counts.shared + counts.cached + counts.free;
    const held = counts.single + counts.shared;
    byId("block-map").setAttribute(
      "aria-label",
      `Map of ${total} KV blocks: ${held} in use, ${counts.shared} of them shared, ${counts.cached} free in the prefix cache`,
    );
  }
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function percent(part, all) {
  return all ? `${((100 * part) / all).toFixed(1)} %` : "none";
}

/** Text that is the same is left alone: selections in it stay. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** As many children as rows, of which only what has changed is touched. */
function setRows(parent, rows, make, update) {
  while (parent.children.length > rows.length) parent.lastElementChild.remove();
  rows.forEach((row, i) => {
    if (!parent.children[i]) parent.append(make(row));
    update(parent.children[i], row);
  });
}

function newNumber([name]) {
  const row = document.createElement("div");
  const term = document.createElement("dt");
  term.textContent = name;
  row.append(term, document.createElement("dd"));
  return row;
}

function newLegendEntry([text, kind]) {
  const row = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = `swatch ${kind}`;
  row.append(swatch, document.createElement("b"), ` ${text}`);
  return row;
}

function newRequestRow() {
  const row = document.createElement("tr");
  for (let i = 0; i < 5; i += 1) row.insertCell();
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  row.cells[0].append(swatch, document.createElement("span"));
  return row;
}

function showRequests(requests, hues, blockCounts) {
  const rows = requests.slice(0, MAX_ROWS).map((request, i) => ({ request, hue: hues[i], blocks: blockCounts[i] }));
  setRows(byId("requests"), rows, newRequestRow, ({ cells }, { request, hue, blocks }) => {
    const [swatch, name] = cells[0].children;
    swatch.style.setProperty("--hue", hue);
    setText(name, request.request_id);
    cells[0].title = request.request_id;
    const sequences = request.num_sequences > 1 ? ` × ${request.num_sequences}` : "";
    setText(cells[1], request.state + sequences);
    setText(cells[2], whole.format(request.num_prompt_tokens));
    setText(cells[3], whole.format(request.num_output_tokens));
    setText(cells[4], whole.format(blocks));
  });
  const more = requests.length - rows.length;
  setText(byId("more-requests"), requests.length ? (more > 0 ? `and ${whole.format(more)} more` : "") : "None now.");
}
