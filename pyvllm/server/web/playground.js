// The left part of the page: a chat or a completion, and the settings of both.

import { CHAT, COMPLETION, Generator } from "./generation.js";
import { readSettings } from "./settings.js";
import { explainTokens } from "./tokens.js";

const byId = (id) => document.getElementById(id);

export class Playground {
  /** `model`: returns the name to ask for. `failed`: called with an ApiError, or null once something goes well. */
  constructor(model, failed) {
    this.model = model;
    this.failed = failed;
    this.messages = [];
    this.hint = byId("transcript").firstElementChild;
    this.generator = new Generator(byId("status"), byId("announcement"), () => this.showRunning());
    this.listen();
    for (const pane of [byId("transcript"), byId("output")]) explainTokens(pane, byId("token-tip"));
  }

  listen() {
    for (const radio of document.querySelectorAll("[name=mode]")) {
      radio.addEventListener("change", () => this.setMode(radio.value));
    }
    onSubmit(byId("chat-form"), byId("message"), () => this.chat());
    onSubmit(byId("completion-form"), byId("prompt"), () => this.complete());
    for (const button of document.querySelectorAll(".stop")) {
      button.addEventListener("click", () => this.generator.stop());
    }
    byId("new-chat").addEventListener("click", () => this.newChat());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) this.generator.stop();
    });
  }

  setMode(mode) {
    byId("chat").hidden = mode !== "chat";
    byId("completion").hidden = mode === "chat";
    const { maxTokens } = mode === "chat" ? CHAT : COMPLETION;
    byId("settings-form").elements.max_tokens.placeholder = maxTokens ?? "what fits";
  }

  /** Stopping is possible exactly while something runs; the focus stays where there is something to do. */
  showRunning() {
    const { running } = this.generator;
    for (const form of document.querySelectorAll("form.send")) {
      const start = form.querySelector(".start");
      const stop = form.querySelector(".stop");
      const wasOnStop = document.activeElement === stop;
      start.disabled = running;
      stop.disabled = !running;
      if (wasOnStop && !running) form.querySelector("textarea").focus();
    }
  }

  /** The settings, or null after showing which one is wrong. */
  settings() {
    const { fields, logprobs, error, input } = readSettings(byId("settings-form"));
    if (!error) return { fields: { model: this.model(), ...fields }, logprobs };
    byId("settings").open = true;
    input.focus();
    byId("status").textContent = byId("announcement").textContent = error;
    return null;
  }

  newChat() {
    this.generator.stop();
    this.messages = [];
    byId("transcript").replaceChildren(this.hint);
    byId("status").textContent = "\u00a0";
    byId("message").focus();
  }

  async chat() {
    const settings = this.settings();
    if (!settings) return;
    const input = byId("message");
    const question = input.value;
    const messages = this.messages;
    messages.push({ role: "user", content: question });
    input.value = "";
    const pane = byId("transcript");
    this.hint.remove();
    const asked = addMessage(pane, "You", "user", question);
    const answer = addMessage(pane, "Model", "assistant", "");
    pane.scrollTop = pane.scrollHeight;

    const system = byId("system").value;
    const before = system ? [{ role: "system", content: system }] : [];
    const body = { ...settings.fields, messages: [...before, ...messages] };
    const { text, error } = await this.generator.run(CHAT, body, settings.logprobs, answer.lastElementChild, pane);
    this.failed(error);
    if (text || !error) {
      messages.push({ role: "assistant", content: text });
      return;
    }
    // Nothing came: as if it had not been asked.
    messages.pop();
    asked.remove();
    answer.remove();
    input.value ||= question;
  }

  async complete() {
    const settings = this.settings();
    if (!settings) return;
    const prompt = byId("prompt").value;
    const pane = byId("output");
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = prompt;
    const made = document.createElement("span");
    pane.replaceChildren(given, made);
    const body = { ...settings.fields, prompt };
    const { error } = await this.generator.run(COMPLETION, body, settings.logprobs, made, pane);
    this.failed(error);
  }
}

/** Enter sends, Shift+Enter breaks the line; not while an input method puts a character together. */
function onSubmit(form, input, act) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!form.querySelector(".start").disabled && input.value) act();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

function addMessage(pane, name, role, text) {
  const message = document.createElement("article");
  message.className = `message ${role}`;
  const title = document.createElement("h3");
  title.textContent = name;
  const content = document.createElement("div");
  content.textContent = text;
  message.append(title, content);
  pane.append(message);
  return message;
}
