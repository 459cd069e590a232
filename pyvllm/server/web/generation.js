// One answer at a time: from a request's body to text on the page, and how fast it came.

import { ApiError, stream } from "./api.js";
import { ALTERNATIVES } from "./settings.js";
import { TokenText, tokensOfChat, tokensOfCompletion } from "./tokens.js";

const NEAR_END_PX = 40;
const DRAW_MS = 40;

/** How the two APIs differ. `maxTokens`: what is asked for unless the user says something else. */
export const CHAT = {
  path: "v1/chat/completions",
  maxTokens: undefined, // what the context has room for
  logprobs: { logprobs: true, top_logprobs: ALTERNATIVES },
  textOf: (choice) => choice.delta.content ?? "",
  tokensOf: tokensOfChat,
};
export const COMPLETION = {
  path: "v1/completions",
  maxTokens: 256, // the API's own default is but 16
  logprobs: { logprobs: ALTERNATIVES },
  textOf: (choice) => choice.text,
  tokensOf: tokensOfCompletion,
};

/** Counts tokens, and says how fast they come. */
class Speed {
  constructor() {
    this.start = performance.now();
    this.first = this.last = null;
    this.firstTokens = this.tokens = 0;
  }

  count(tokens) {
    if (!tokens || tokens === this.tokens) return;
    this.last = performance.now();
    this.tokens = tokens;
    if (this.first === null) {
      this.first = this.last;
      this.firstTokens = tokens;
    }
  }

  /** What came first, at once, tells nothing about the speed. */
  toString() {
    if (this.first === null) return "";
    const parts = [`${this.tokens} token${this.tokens === 1 ? "" : "s"}`];
    const seconds = (this.last - this.first) / 1000;
    if (seconds > 0) parts.push(`${((this.tokens - this.firstTokens) / seconds).toFixed(1)} tokens/s`);
    parts.push(`first after ${((this.first - this.start) / 1000).toFixed(2)} s`);
    return parts.join(", ");
  }
}

export class Generator {
  /**
   * `status`: element that tells about progress; `announcement`: what is read out, which is only how it ended.
   * `changed`: called when one begins or ends.
   */
  constructor(status, announcement, changed) {
    this.status = status;
    this.announcement = announcement;
    this.changed = changed;
    this.controller = null;
  }

  get running() {
    return this.controller !== null;
  }

  stop() {
    this.controller?.abort();
  }

  /**
   * Stream an answer into `element`, which lies in the scrolling `pane`. Returns `{text, error}`: what came, and the
   * ApiError that ended it, or null.
   */
  async run(api, body, withLogprobs, element, pane) {
    const controller = (this.controller = new AbortController());
    this.changed();
    const output = new TokenText(element);
    const speed = new Speed();
    let ending = "";
    let error = null;
    element.classList.add("writing");
    this.status.textContent = "Waiting for the first token. Esc stops.";
    this.announcement.textContent = "";
    try {
      const chunks = stream(api.path, requestBody(api, body, withLogprobs), controller.signal);
      ending = await this.show(chunks, api, output, speed, pane);
    } catch (problem) {
      if (controller.signal.aborted) ending = "stopped by you";
      else if (problem instanceof ApiError) error = problem;
      else throw problem;
    } finally {
      element.classList.remove("writing");
      this.controller = null;
      this.status.textContent = [speed.toString(), error ? "failed" : ending].filter(Boolean).join(", ");
      this.announcement.textContent = this.status.textContent;
      this.changed();
    }
    return { text: output.text, error };
  }

  /** Returns why it ended. Tokens may come by the hundred in a second: the page is drawn less often. */
  async show(chunks, api, output, speed, pane) {
    const decoder = new TextDecoder();
    let ending = "";
    let timer = null;
    const draw = () => {
      timer = null;
      const atEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < NEAR_END_PX;
      output.draw();
      this.status.textContent = speed.toString() || this.status.textContent;
      // Whoever has scrolled up reads there.
      if (atEnd) pane.scrollTop = pane.scrollHeight;
    };
    try {
      for await (const { choices, usage } of chunks) {
        speed.count(usage?.completion_tokens);
        for (const choice of choices) {
          output.add(api.textOf(choice), api.tokensOf(choice.logprobs, decoder));
          ending = endingOf(choice) || ending;
        }
        timer ??= setTimeout(draw, DRAW_MS);
      }
    } finally {
      clearTimeout(timer);
      output.end();
      draw();
    }
    return ending;
  }
}

function requestBody(api, body, withLogprobs) {
  const usage = { include_usage: true, continuous_usage_stats: true };
  return { max_tokens: api.maxTokens, ...body, stream_options: usage, ...(withLogprobs ? api.logprobs : {}) };
}

function endingOf({ finish_reason: reason, stop_reason: what }) {
  if (reason === "length") return "ended at the token limit";
  if (reason === "stop" && typeof what === "string") return `ended at ${JSON.stringify(what)}`;
  return reason === "stop" ? "ended by itself" : reason;
}
