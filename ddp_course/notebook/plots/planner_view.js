// The page of planner.js: controls, two bars, numbers. It finds its place without an id,
// so that a page can have several, and every text is in the page's own font and colour.

var NAMES = {
  weights: "weights", gradients: "gradients", optimizer: "optimizer",
  activations: "activations", moment: "for a moment", products: "products",
  attention: "attention", bubble: "bubble", tensor: "tensor ranks",
  context: "context ranks", expert: "expert ranks", data: "data ranks"
};

// A number with three digits or so, as plots/words.py writes it.
function number(value) {
  if (value >= 0.9995e12) return Number((value / 1e12).toPrecision(3)) + " trillion";
  if (value >= 0.9995e9) return Number((value / 1e9).toPrecision(3)) + " billion";
  if (value >= 0.9995e6) return Number((value / 1e6).toPrecision(3)) + " million";
  if (value < 1000) return String(Number(value.toPrecision(3)));
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
}

function make(kind, parent, name, text) {
  var node = document.createElement(kind);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// A number that is shown; its attribute has all digits.
function shown(parent, name, value, text) {
  var node = make("data", parent, "", text);
  node.value = String(value);
  node.setAttribute("data-name", name);
}

function gigabytes(bytes) {
  return number(bytes / 1e9) + " GB";
}

function in_seconds(seconds) {
  return number(seconds) + " s";
}

// ---- controls ----

function powers(last) {
  return Array.from({ length: last + 1 }, function (_, power) { return 1 << power; });
}

// [name, label, kind, values, how a value is written]; a field has, in place of values,
// what it says while it is empty
function controls_of(data) {
  return [
    ["model", "model", "select", Object.keys(data.models)],
    ["gpu", "GPU", "select", Object.keys(data.gpus)],
    ["gpus", "number of GPUs", "range", powers(14), number],
    ["tensor", "tensor ranks", "select", powers(3)],
    ["pipeline", "pipeline ranks", "select", powers(7)],
    ["context_ranks", "context ranks", "select", powers(6)],
    ["expert", "expert ranks", "select", powers(6)],
    ["context", "tokens per sequence", "range", powers(20).slice(10), number],
    ["batch", "sequences per step", "number"],
    ["micro_batch", "micro-batch", "select", powers(4)],
    ["stage", "ZeRO", "select", [0, 1, 3], function (stage) {
      return ["0: DDP", "1: optimizer sharded", "", "3: FSDP"][stage];
    }],
    ["recompute", "recompute", "select", ["none", "full"]],
    ["chunks", "chunks per rank", "select", [1, 2, 4]],
    ["tokens", "training tokens", "number", "20 per parameter"],
    ["price", "price per GPU hour", "number", "none"]
  ];
}

// A label with its control. Returns a function that reads its value.
function control(parent, of, chosen, turned) {
  var name = of[0], kind = of[2], written = of[4] || String;
  var values = kind === "number" ? [] : of[3].slice();
  if (kind !== "number" && values.indexOf(chosen[name]) < 0) {
    values.push(chosen[name]);
    values.sort(function (one, other) { return one - other; });
  }
  var label = make("label", parent, kind === "range" ? "long" : "");
  var text = make("span", label, "", of[1]);
  var input = make(kind === "select" ? "select" : "input", label);
  var read = function () { return values[input.value]; };
  if (kind === "select") {
    values.forEach(function (value, place) {
      make("option", input, "", written(value)).value = place;
    });
    input.value = values.indexOf(chosen[name]);
  } else {
    input.type = kind;
  }
  if (kind === "range") {
    input.max = values.length - 1;
    input.value = values.indexOf(chosen[name]);
    var told = make("span", text, "told");
    var tell = function () {
      told.textContent = ": " + written(read());
      input.setAttribute("aria-valuetext", written(read()));
    };
    input.addEventListener("input", tell);
    tell();
  }
  if (kind === "number") {
    input.min = 0;
    input.placeholder = of[3] || "";
    input.step = "any";
    input.value = chosen[name] === null ? "" : chosen[name];
    read = function () { return Number(input.value); };
  }
  input.name = name;
  // else JupyterLab takes some keys for its own commands
  input.setAttribute("data-lm-suppress-shortcuts", "true");
  input.addEventListener("input", turned);
  return read;
}

// ---- what is shown ----

// A stacked bar with its caption. sizes: by part; whole: what its full width is.
function bar(parent, caption, sizes, whole, unit, colors) {
  make("p", parent, "said", caption);
  var box = make("div", parent, "bar"), told = [];
  Object.keys(sizes).forEach(function (name) {
    var share = sizes[name] / whole;
    var part = make("div", box, "part", share > 0.22 ? NAMES[name] : "");
    part.style.width = 100 * share + "%";
    part.style.background = colors[name][0];
    part.style.color = colors[name][1];
    told.push(NAMES[name] + " " + unit(sizes[name]));
  });
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", caption + ": " + told.join(", "));
  return box;
}

// The parts of a bar as rows: colour, name, number.
function rows(parent, title, sizes, unit, colors) {
  var list = make("div", parent, "entries");
  make("strong", list, "", title);
  Object.keys(sizes).forEach(function (name) {
    var row = make("div", list, "entry");
    make("span", row, "swatch").style.background = colors[name][0];
    make("span", row, "", NAMES[name]);
    shown(row, name, sizes[name], unit(sizes[name]));
  });
}

function planner(root, data, first) {
  root.textContent = "";
  make("style", root, "", data.style);
  var page = make("div", root, "page"), bars = make("div", page, "bars");
  var said = make("p", bars, "said"), drawn = make("div", bars);
  var box = make("div", page, "controls"), numbers = make("div", page, "numbers");
  said.setAttribute("role", "status");
  // so that the page below does not move where there is no such plan
  bars.style.minHeight = "11em";

  var readers = {};
  controls_of(data).forEach(function (of) {
    readers[of[0]] = control(box, of, first, turn);
  });

  function turn() {
    var chosen = {};
    Object.keys(readers).forEach(function (name) { chosen[name] = readers[name](); });
    var why = problem(data, chosen);
    said.textContent = drawn.textContent = numbers.textContent = "";
    if (why) {
      make("span", said, "verdict no", "no such plan");
      said.append(" " + why);
    } else {
      show(plan_of(data, chosen), data.gpus[chosen.gpu].memory, chosen);
    }
  }

  function show(plan, memory, chosen) {
    var verdict = plan.fits ? ["yes", "fits"] : ["no", "does not fit"];
    make("span", said, "verdict " + verdict[0], verdict[1]);
    said.append(" below the line at " + gigabytes(plan.limit) + ", 90 % of a GPU");
    var whole = Math.max(plan.bytes, memory);
    var caption = "Memory per rank: " + gigabytes(plan.bytes);
    var bytes = bar(drawn, caption, plan.kept, whole, gigabytes, data.colors);
    make("div", bytes, "limit").style.left = 100 * plan.limit / whole + "%";
    if (!plan.fits) bytes.classList.add("over");
    caption = "One step: " + in_seconds(plan.seconds);
    bar(drawn, caption, plan.parts, plan.seconds, in_seconds, data.colors);
    rows(numbers, "Bytes per rank", plan.kept, gigabytes, data.colors);
    rows(numbers, "One step", plan.parts, in_seconds, data.colors);
    rest(plan, chosen);
  }

  function rest(plan, chosen) {
    var list = make("div", numbers, "entries");
    var row = function (name, label, value, text) {
      var line = make("div", list, "entry");
      make("span", line, "", label);
      shown(line, name, value, text);
    };
    make("strong", list, "", "The run");
    row("data_ranks", "data ranks", plan.run.mesh.data, number(plan.run.mesh.data));
    row("bytes", "memory per rank", plan.bytes, gigabytes(plan.bytes));
    row("seconds", "one step", plan.seconds, in_seconds(plan.seconds));
    row("utilization", "MFU", plan.utilization, number(100 * plan.utilization) + " %");
    row("tokens_per_second", "tokens/s", plan.tokens_per_second,
      number(plan.tokens_per_second));
    row("tokens", "training tokens", plan.tokens, number(plan.tokens));
    row("days", "days", plan.days, number(plan.days));
    row("gpu_hours", "GPU hours", plan.gpu_hours, number(plan.gpu_hours));
    if (chosen.price > 0) row("cost", "cost", plan.cost, number(plan.cost));
  }

  turn();
}
