// The labelling page. Text from outside (file names, labels, people) only ever enters through textContent and
// attributes. What a person says goes into an outbox first and leaves it when the server has stored it, so that
// neither a killed server nor a reload loses a label; the server stores each request once, however often it is sent.

const $ = (id) => document.getElementById(id);
const FEW_AHEAD = 5;
const PAGE = 60;

let state = null;
let queue = [];
let at = 0;
let view = "label";
let asking = false;
let announcedModel = null;
let grid = { items: [], total: 0, offset: 0, focus: 0, anchor: 0, chosen: new Set() };

// ---- small tools

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

const say = (words) => { $("live").textContent = ""; setTimeout(() => { $("live").textContent = words; }, 30); };
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const count = (number) => number.toLocaleString("en");
const thumb = (row) => `/thumb/${state.key}/${row}`;
const photo = (row) => `/photo/${state.key}/${row}`;
const token = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");
const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);
const typing = (node) => node.matches("input, select, textarea");

function place(number) {
  const tail = number % 100 > 10 && number % 100 < 14 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[number % 10] || "th";
  return count(number) + tail;
}

// Photos come sharp where files are at hand; small pictures keep their pixels.
function showImage(node, row, sharp) {
  node.onload = () => node.classList.toggle("tiny", Math.max(node.naturalWidth, node.naturalHeight) <= 64);
  const source = sharp ? photo(row) : thumb(row);
  if (node.getAttribute("src") !== source) node.src = source;
}

async function call(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  const response = await fetch(path, options);
  const type = response.headers.get("content-type") || "";
  const answer = type.startsWith("application/json") ? await response.json() : await response.text();
  if (!response.ok) {
    const refusal = new Error(typeof answer === "string" ? answer : [answer.detail].flat().map((d) => d.msg || d).join("; "));
    refusal.status = response.status;
    throw refusal;
  }
  return answer;
}

function trouble(words) {
  $("trouble").textContent = words;
  $("trouble").hidden = !words;
}

// ---- the outbox

const BOX = "elsa-outbox";
let outbox = JSON.parse(sessionStorage.getItem(BOX) || "[]");
let sending = false;
let unreachable = false;

function keepOutbox() {
  sessionStorage.setItem(BOX, JSON.stringify(outbox));
  const waiting = outbox.reduce((sum, one) => sum + (one.body.items ? one.body.items.length : 1), 0);
  $("saved").classList.toggle("waiting", unreachable);
  $("saved").textContent = unreachable
    ? (waiting ? `No answer: ${count(waiting)} waiting to be saved` : "No answer from elsa")
    : (waiting > 1 ? `Saving ${count(waiting)}` : "Saved");
}

function post(path, body, then) {
  outbox.push({ path, body: { request: token(), who: $("who").value.trim(), ...body } });
  callbacks.set(outbox.at(-1).body.request, then);
  keepOutbox();
  deliver();
}

const callbacks = new Map();

async function deliver() {
  if (sending) return;
  sending = true;
  while (outbox.length) {
    const first = outbox[0];
    try {
      const answer = await call(first.path, first.body);
      unreachable = false;
      outbox.shift();
      callbacks.get(first.body.request)?.(answer);
    } catch (problem) {
      if (!problem.status || problem.status >= 500) {
        unreachable = true;
        keepOutbox();
        await new Promise((done) => setTimeout(done, 1000));
        continue;
      }
      outbox.shift();
      trouble(`Not saved: ${problem.message}`);
    }
    keepOutbox();
  }
  sending = false;
  keepOutbox();
  look();
}

addEventListener("beforeunload", (event) => { if (outbox.length && unreachable) event.preventDefault(); });

// ---- what stands

let looking = false;
let timer = null;

async function look() {
  if (looking) return;
  looking = true;
  clearTimeout(timer);
  try {
    const fresh = await call("/api/state");
    if (unreachable) { unreachable = false; keepOutbox(); deliver(); }
    await take(fresh);
  } catch (problem) {
    if (problem.status) trouble(problem.message);
    else { unreachable = true; keepOutbox(); }
  }
  looking = false;
  const pause = unreachable || state?.work || state?.phase !== "ready" ? 700 : document.hidden ? 8000 : 2000;
  timer = setTimeout(look, pause);
}

async function take(fresh) {
  const before = state;
  state = fresh;
  keepOutbox();
  trouble(fresh.trouble);
  $("preparing").hidden = fresh.phase === "ready";
  showWork();
  if (fresh.phase !== "ready") {
    for (const name of ["label", "browse", "models"]) $(`view-${name}`).hidden = true;
    return;
  }
  if (!before || before.phase !== "ready") show(view);
  if (before && before.key && before.key !== fresh.key) { queue = []; at = 0; }
  showLearning();
  showEstimates();
  if (fresh.model !== announcedModel) {
    const first = announcedModel === null;
    announcedModel = fresh.model;
    if (!first && before?.phase === "ready") {
      say(`Model ${fresh.model} is in use.`);
      queue = queue.filter((item, i) => i <= at || item.word || item.strategy === "random audit");
    }
    await fill(true);
    await showChanged();
    if (view === "browse") browse(grid.offset);
    if (view === "models") showModels();
  } else if (view === "models" && before?.event !== fresh.event) showModels();
  await fill();
}

function showWork() {
  const work = state.work;
  const stages = {
    "look at images": "Looking at the images", "read images": "Reading", "hash images": "Checking", "embed": "Embedding",
    "fit": "Fitting", "head": "Fitting", "prototypes": "Finding prototypes",
  };
  if (state.phase !== "ready") {
    const done = work && work.total ? work.done / work.total : 0;
    $("prepare-bar").style.width = `${100 * done}%`;
    $("prepare-words").textContent = work
      ? `${stages[work.stage] || sentence(work.stage)}${work.total > 2 ? `: ${count(work.done)} of ${count(work.total)} images` : ""}`
      : "";
  }
}

function showLearning() {
  for (const word of ["normal", "anomaly", "unsure", "conflict"]) $(`count-${word}`).textContent = count(state.counts[word]);
  $("count-conflict-box").hidden = !state.counts.conflict;
  const work = state.work;
  const share = work ? (work.total ? Math.max(0.08, work.done / work.total) : 0.08) : Math.min(1, state.pending / state.batch);
  $("learning-bar").style.width = `${100 * share}%`;
  $("learning-meter").setAttribute("aria-valuenow", Math.round(100 * share));
  const missing = Math.max(0, state.batch - state.pending);
  const words = work
    ? "Fitting a new model; go on labelling"
    : `Model ${state.model}. ${missing} more ${missing === 1 ? "label" : "labels"} until the next fit`;
  $("learning-words").textContent = words;
  $("learning-meter").setAttribute("aria-valuetext", words);
  $("refit").disabled = Boolean(work) || !state.pending;
}

// What all of the reasons ask for, once: "20 words from the random audit (3 so far), 10 known anomalies (7)".
function needed(reasons) {
  const wanted = new Map();
  for (const reason of reasons) {
    for (const [, most, what, now] of reason.matchAll(/([\d,]+) ([^,]+), there (?:are|is) ([\d,]+)/g)) {
      const before = wanted.get(what);
      if (!before || Number(most) > Number(before[0])) wanted.set(what, [most, now]);
    }
  }
  if (!wanted.size) return reasons[0];
  const parts = [...wanted].map(([what, [most, now]], i) => `${most} ${what} (${now}${i ? "" : " so far"})`);
  return `For these it takes ${parts.join(", ")}.`;
}

function showEstimates() {
  const stated = state.estimates.filter((one) => one.value !== null);
  const rows = stated.map((one) => {
    const bar = make("i"), point = make("b");
    bar.style.left = percent(one.low);
    bar.style.width = percent(one.high - one.low);
    point.style.left = percent(one.value);
    return make("div", { className: "estimate" },
      make("span", { textContent: one.title }), make("b", { textContent: percent(one.value) }),
      make("div", { className: "range", "aria-hidden": "true" }, bar, point),
      make("small", { textContent: `95% interval ${percent(one.low)} to ${percent(one.high)}` }));
  });
  const lacking = state.estimates.filter((one) => one.value === null);
  rows.push(...lacking.map((one) => make("div", { className: "estimate" },
    make("span", { textContent: one.title }), make("span", { className: "soft", textContent: "not yet" }))));
  if (lacking.length) rows.push(make("p", { className: "lacking", textContent: needed(lacking.map((one) => one.reason)) }));
  $("estimates").replaceChildren(...rows);
}

// Estimates of one model beside those of the one before; nothing where neither could be stated.
function figures(before, now) {
  const shares = (one) => (one && one.value !== null ? percent(one.value) : "–");
  const rows = now.flatMap((one, i) => (one.value === null && (before?.[i]?.value ?? null) === null ? [] : [make("tr", {},
    make("th", { scope: "row", textContent: one.title }),
    make("td", { textContent: shares(before?.[i]) }), make("td", { textContent: shares(one) }))]));
  if (!rows.length) return [];
  const head = make("tr", {}, make("td"), make("th", { scope: "col", textContent: "before" }), make("th", { scope: "col", textContent: "now" }));
  return [make("thead", {}, head), make("tbody", {}, ...rows)];
}

function movedList(moved) {
  return moved.map((move) => {
    const words = `${place(move.from)} to ${place(move.to)}`;
    const image = make("img", { alt: "", loading: "lazy" });
    showImage(image, move.row, false);
    const button = make("button", { type: "button", title: move.name, "aria-label": `${move.name}, moved from ${words}. Zoom` },
      image, make("span", { textContent: `${count(move.from)} → ${count(move.to)}`, "aria-hidden": "true" }));
    button.onclick = () => zoom({ row: move.row, name: move.name }, `${move.name}: ${words}`);
    return make("li", {}, button);
  });
}

async function showChanged() {
  const models = await call("/api/models");
  const current = models.find((model) => model.current);
  $("changed").hidden = !current || !current.before;
  if (!current || !current.before) return;
  const labels = current.labels.normal + current.labels.anomaly;
  $("changed-words").textContent = `Model ${current.id} learned from ${count(labels)} ${labels === 1 ? "label" : "labels"} in ${current.seconds.toFixed(1)} s. Places are counted from the most anomalous.`;
  $("changed-table").replaceChildren(...figures(current.before, current.now));
  $("moved-title").hidden = !current.moved.length;
  $("moved").replaceChildren(...movedList(current.moved.slice(0, 8)));
}

async function showModels() {
  const models = await call("/api/models");
  $("models").replaceChildren(...models.map((model) => {
    const use = make("button", { type: "button", textContent: "Go back to this model", "aria-label": `Go back to model ${model.id}` });
    use.onclick = async () => {
      try { await call(`/api/models/${model.id}/use`, {}); say(`Model ${model.id} is in use`); await look(); showModels(); }
      catch (problem) { trouble(problem.message); }
    };
    const labels = `${count(model.labels.normal)} normal, ${count(model.labels.anomaly)} anomaly`;
    const card = make("li", { className: model.current ? "card using-card" : "card" },
      make("header", {}, make("h2", { textContent: `Model ${model.id}` }),
        model.current ? make("span", { className: "using", textContent: "In use" }) : use),
      make("p", { className: "soft", textContent: `${new Date(model.at).toLocaleString()} · ${labels} · ${model.seconds.toFixed(1)} s` }),
      make("table", { className: "figures" }, ...figures(model.before, model.now)));
    if (model.moved.length) card.append(make("h3", { textContent: "Moved most" }), make("ul", { className: "moved" }, ...movedList(model.moved.slice(0, 5))));
    return card;
  }));
}

// ---- one by one

async function fill(force) {
  if (asking || state?.phase !== "ready") return;
  if (!force && queue.length - at > FEW_AHEAD) return;
  asking = true;
  try {
    const strategy = encodeURIComponent($("strategy").value);
    const seed = crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
    const fresh = await call(`/api/queue?strategy=${strategy}&count=${state.batch + FEW_AHEAD}&seed=${seed}`);
    const known = new Set(queue.map((item) => item.name));
    const added = fresh.filter((item) => !known.has(item.name));
    queue.push(...added);
    if (added.length || !queue.length) showQueue();
  } catch (problem) { if (problem.status) trouble(problem.message); }
  asking = false;
}

function facts(item) {
  const parts = [`${place(item.rank)} of ${count(state.images)}`, `score ${item.score.toFixed(2)}`, `p ${item.p.toFixed(3)}`, `prototype ${item.prototype}`];
  if (item.given) parts.push(`source says ${item.given}`);
  return parts.join(" · ");
}

function showQueue() {
  at = Math.max(0, Math.min(at, queue.length));  // one beyond the last while more is asked for
  const item = queue[at];
  $("strip").replaceChildren();
  for (const button of document.querySelectorAll("[data-word]")) {
    button.disabled = !item;
    button.setAttribute("aria-pressed", Boolean(item && item.word === button.dataset.word));
  }
  $("back").disabled = at === 0;
  $("forth").disabled = at >= queue.length - 1;
  if (!item) {
    $("current").removeAttribute("src");
    $("current").alt = "";
    $("current-name").textContent = outbox.length || asking ? "Asking for more" : "Every image has a label";
    $("current-facts").textContent = $("current-why").textContent = "";
    return;
  }
  showImage($("current"), item.row, document.body.dataset.photos === "yes");
  const said = item.word ? `, labelled ${item.word}` : "";
  $("current").alt = `${item.name}, ${place(item.rank)} most anomalous${said}`;
  $("current-name").textContent = item.name;
  $("current-facts").textContent = facts(item);
  const why = $("strategy").querySelector(`option[value="${CSS.escape(item.strategy)}"]`)?.textContent || item.strategy;
  $("current-why").textContent = item.word ? `You said ${item.word}` : `Asked as: ${why}`;
  const first = Math.max(0, at - 2);
  $("strip").append(...queue.slice(first, first + 16).map((one, i) => {
    const image = make("img", { alt: "" });
    showImage(image, one.row, false);
    const button = make("button", { type: "button", tabIndex: -1, "aria-label": `${one.name}${one.word ? `, ${one.word}` : ""}` }, image);
    if (one.word) button.append(make("span", { className: `dot ${one.word}` }));
    if (first + i === at) button.setAttribute("aria-current", "true");
    button.onclick = () => { at = first + i; showQueue(); };
    return make("li", {}, button);
  }));
  if (document.body.dataset.photos === "yes" && queue[at + 1]) new Image().src = photo(queue[at + 1].row);
}

function asSaid(item, word, settle) {
  return {
    name: item.name, label: word, model: item.model, score: item.score,
    strategy: settle ? "settle" : item.strategy || "", probability: settle ? null : item.probability ?? null,
  };
}

function verdict(word) {
  const item = queue[at];
  if (!item) return;
  post("/api/labels", { items: [asSaid(item, word, false)] });
  item.word = word;
  if (state.counts) { state.pending += 1; }
  say(`${item.name}: ${word}`);
  at += 1;
  showQueue();
  fill();
}

function undo() {
  post("/api/undo", {}, (answer) => {
    if (!answer.undone.length) { say("Nothing to undo"); return; }
    const names = new Set(answer.undone);
    for (const item of queue) if (names.has(item.name)) item.word = "";
    const back = queue.findIndex((item) => names.has(item.name));
    if (back >= 0) at = back;
    say(`Undone: ${answer.undone.length === 1 ? answer.undone[0] : `${answer.undone.length} labels`}`);
    showQueue();
    if (view === "browse") browse(grid.offset);
  });
}

function step(by) {
  at = Math.max(0, Math.min(queue.length - 1, at + by));
  showQueue();
  fill();
  if (queue[at]) say(`${queue[at].name}${queue[at].word ? `, ${queue[at].word}` : ""}`);
}

// ---- zoom

function zoom(item, words) {
  if (!item) return;
  showImage($("zoom-image"), item.row, true);
  $("zoom-image").alt = item.name;
  $("zoom-words").textContent = words || `${item.name} · ${facts(item)}`;
  $("zoom").showModal();
}

// ---- many at once

async function browse(offset) {
  const form = new FormData($("filters"));
  const query = new URLSearchParams({ offset: Math.max(0, offset), count: PAGE });
  for (const [name, value] of form) if (value !== "") query.set(name, value);
  try {
    const found = await call(`/api/images?${query}`);
    grid = { ...found, focus: 0, anchor: 0, chosen: new Set() };
    trouble(state.trouble);
  } catch (problem) { if (problem.status) trouble(problem.message); return; }
  $("settle").hidden = form.get("show") !== "conflict";
  showGrid();
}

function showGrid() {
  $("grid").replaceChildren(...grid.items.map((item, i) => {
    const image = make("img", { alt: "", loading: "lazy", draggable: false });
    showImage(image, item.row, false);
    const word = item.word || (item.given ? `${item.given}, says the source` : "");
    const kind = item.word || item.given;
    const people = Object.entries(item.people).map(([who, said]) => `${who}: ${said}`).join(", ");
    const words = make("div", { className: "words" }, make("span", { className: "name", textContent: item.name, title: item.name }),
      make("span", { className: "line" }, make("span", { textContent: item.score.toFixed(2) })));
    if (kind) words.lastChild.append(make("span", {
      className: `word ${kind}${item.word ? "" : " given"}`, textContent: kind === "conflict" ? "disagree" : kind, title: people || word,
    }));
    if (item.word === "conflict") words.append(make("span", { className: "line", textContent: people }));
    const tile = make("li", {
      className: "tile", id: `tile-${i}`, role: "option", tabIndex: i === grid.focus ? 0 : -1, "aria-selected": "false",
      "aria-label": `${item.name}, score ${item.score.toFixed(2)}${word ? `, ${word}` : ""}${people && item.word === "conflict" ? `: ${people}` : ""}`,
    }, make("div", { className: "picture" }, image), words);
    tile.onclick = (event) => choose(i, event.shiftKey, event.ctrlKey || event.metaKey);
    tile.ondblclick = () => zoom(item);
    return tile;
  }));
  $("grid").hidden = !grid.items.length;
  $("grid-empty").hidden = Boolean(grid.items.length);
  $("page-back").disabled = grid.offset === 0;
  $("page-forth").disabled = grid.offset + grid.items.length >= grid.total;
  $("page-words").textContent = grid.total ? `${count(grid.offset + 1)} to ${count(grid.offset + grid.items.length)} of ${count(grid.total)}` : "";
  marks();
}

function marks() {
  [...$("grid").children].forEach((tile, i) => {
    tile.setAttribute("aria-selected", grid.chosen.has(i));
    tile.tabIndex = i === grid.focus ? 0 : -1;
  });
  const chosen = grid.chosen.size;
  $("browse-words").textContent = chosen ? `${count(chosen)} selected of ${count(grid.total)}` : `${count(grid.total)} ${grid.total === 1 ? "image" : "images"}`;
  for (const button of document.querySelectorAll("[data-mass]")) button.disabled = !grid.items.length;
}

function choose(i, range, add) {
  if (range) {
    if (!add) grid.chosen.clear();
    for (let k = Math.min(grid.anchor, i); k <= Math.max(grid.anchor, i); k++) grid.chosen.add(k);
  } else if (add) {
    if (!grid.chosen.delete(i)) grid.chosen.add(i);
    grid.anchor = i;
  } else {
    grid.chosen = new Set([i]);
    grid.anchor = i;
  }
  focusTile(i);
}

function focusTile(i) {
  grid.focus = i;
  marks();
  $("grid").children[i]?.focus({ preventScroll: false });
}

function gridMove(by, extend) {
  const to = Math.max(0, Math.min(grid.items.length - 1, grid.focus + by));
  if (extend) choose(to, true, false);
  else { grid.chosen.clear(); grid.anchor = to; focusTile(to); }
}

function columns() {
  const tiles = [...$("grid").children];
  const top = tiles[0]?.offsetTop;
  const wide = tiles.findIndex((tile) => tile.offsetTop !== top);
  return wide < 0 ? tiles.length : wide;
}

function mass(word) {
  const rows = grid.chosen.size ? [...grid.chosen].sort((a, b) => a - b) : [grid.focus];
  const items = rows.map((i) => grid.items[i]).filter(Boolean);
  if (!items.length) return;
  const settle = $("filters").elements.show.value === "conflict";
  post("/api/labels", { items: items.map((item) => asSaid(item, word, settle)) });
  const focus = grid.focus;
  for (const item of items) { item.word = word; item.people = {}; }
  const names = new Set(items.map((item) => item.name));
  for (const item of queue) if (names.has(item.name)) item.word = word;
  grid.chosen = new Set();
  showGrid();
  say(`${items.length === 1 ? items[0].name : `${items.length} images`}: ${word}`);
  focusTile(Math.min(items.length === 1 ? focus + 1 : focus, grid.items.length - 1));
}

// ---- views

function show(name) {
  view = name;
  for (const one of ["label", "browse", "models"]) $(`view-${one}`).hidden = one !== name || state?.phase !== "ready";
  for (const button of document.querySelectorAll("nav button")) {
    if (button.dataset.view === name) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  if (location.hash.slice(1) !== name) history.replaceState(null, "", `#${name}`);
  if (state?.phase !== "ready") return;
  if (name === "browse") {
    const select = $("filters").elements.prototype;
    if (select.length !== state.prototypes + 1) {
      const chosen = select.value;
      select.replaceChildren(make("option", { value: "", textContent: "any" }),
        ...Array.from({ length: state.prototypes }, (_, i) => make("option", { value: i, textContent: i })));
      select.value = chosen;
    }
    browse(0);
  }
  if (name === "models") showModels();
  if (name === "label") { if (queue.length) showQueue(); fill(); }
}

// ---- keys and clicks

addEventListener("keydown", (event) => {
  if (event.altKey || typing(event.target) && event.key !== "Escape") return;
  if ($("zoom").open) {
    if (event.key === " ") { event.preventDefault(); $("zoom").close(); return; }
    if (!"nauz".includes(event.key)) return;
    $("zoom").close();
  }
  if ($("help").open) return;
  const control = event.ctrlKey || event.metaKey;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (control && key === "a" && view === "browse") {
    event.preventDefault();
    grid.chosen = new Set(grid.items.map((_, i) => i));
    marks();
    return;
  }
  if (control) return;
  const words = { n: "normal", a: "anomaly", u: "unsure" };
  const onTile = event.target.closest?.(".tile");
  if (key === "?") { $("help").showModal(); return; }
  if (["1", "2", "3"].includes(key)) { show(["label", "browse", "models"][key - 1]); return; }
  if (state?.phase !== "ready") return;
  if (key === "z") { undo(); return; }
  if (view === "label") {
    if (words[key]) verdict(words[key]);
    else if (key === "ArrowLeft") step(-1);
    else if (key === "ArrowRight") step(1);
    else if (key === " " && (!event.target.closest("button") || event.target.id === "current-frame")) { event.preventDefault(); zoom(queue[at]); }
  } else if (view === "browse") {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns(), Home: -grid.items.length, End: grid.items.length };
    if (words[key]) mass(words[key]);
    else if (key in moves && (onTile || event.target === document.body || event.target === $("main"))) { event.preventDefault(); gridMove(moves[key], event.shiftKey); }
    else if ((key === " " || key === "Enter") && onTile) { event.preventDefault(); zoom(grid.items[grid.focus]); }
    else if (key === "PageDown" && !$("page-forth").disabled) { event.preventDefault(); turn(1); }
    else if (key === "PageUp" && !$("page-back").disabled) { event.preventDefault(); turn(-1); }
    else if (key === "Escape") { grid.chosen.clear(); marks(); }
  }
});

async function turn(by) {
  await browse(grid.offset + by * PAGE);
  scrollTo(0, 0);
  focusTile(0);
}

for (const button of document.querySelectorAll("[data-word]")) button.onclick = () => verdict(button.dataset.word);
for (const button of document.querySelectorAll("[data-mass]")) button.onclick = () => mass(button.dataset.mass);
for (const button of document.querySelectorAll("nav button")) button.onclick = () => show(button.dataset.view);
$("back").onclick = () => step(-1);
$("forth").onclick = () => step(1);
$("undo").onclick = $("undo-mass").onclick = undo;
$("current-frame").onclick = () => zoom(queue[at]);
$("zoom-close").onclick = () => $("zoom").close();
$("zoom").onclick = (event) => { if (event.target === $("zoom")) $("zoom").close(); };
$("help-open").onclick = () => $("help").showModal();
$("help-close").onclick = () => $("help").close();
$("page-back").onclick = () => turn(-1);
$("page-forth").onclick = () => turn(1);
$("refit").onclick = async () => {
  try { await call("/api/refit", {}); look(); } catch (problem) { trouble(problem.message); }
};
$("strategy").onchange = () => { queue = queue.slice(0, at + 1).filter((item) => item.word); at = queue.length; fill(true); };
let typed = null;
$("filters").oninput = () => { clearTimeout(typed); typed = setTimeout(() => browse(0), 200); };
$("filters").onsubmit = (event) => { event.preventDefault(); browse(0); };
$("who").value = localStorage.getItem("elsa-who") || document.body.dataset.who;
$("who").onchange = () => localStorage.setItem("elsa-who", $("who").value.trim());

view = ["label", "browse", "models"].includes(location.hash.slice(1)) ? location.hash.slice(1) : "label";
show(view);
look();
deliver();
