// Puts the page together.

import { ApiError, getJson, hasKey, keys, setKey } from "./api.js";
import { EngineView } from "./engine_view.js";
import { Playground } from "./playground.js";

const byId = (id) => document.getElementById(id);

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

/** Tell about an error, or that all is well again. */
function showProblem(error) {
  if (error?.status === 401) openKeyDialog();
  notice(error && error.status !== 401 ? error.message : "");
}

async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id.split("/").pop(), id)));
    byId("model").disabled = data.length < 2;
    notice("");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showProblem(error);
  }
}

function openKeyDialog() {
  byId("key-error").textContent = hasKey() ? "The server did not accept the key." : "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key-input").select();
}

function listenForKeys() {
  byId("key-button").addEventListener("click", () => byId("key-dialog").showModal());
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      setKey(byId("key-input").value.trim());
    } catch (error) {
      byId("key-error").textContent = error.message;
      return;
    }
    byId("key-input").value = "";
    byId("key-error").textContent = "";
    byId("key-dialog").close();
  });
  keys.addEventListener("change", loadModels);
}

listenForKeys();
new Playground(() => byId("model").value || undefined, showProblem);
new EngineView();
loadModels();
