// The formulas of estimates/step_time.py and estimates/transformer.py, for a page. The
// names are Python's, and so is the order of operations: all numbers are doubles, and
// tests/test_planner.py compares each result to the last bit.

// ---- estimates/transformer.py: a model ----

function groups(model) {
  return Math.floor(model.keys * model.heads / model.width);
}

function mlp(model) {
  return 3 * model.width * model.inner;
}

function dense(model) {
  var attention = 2 * model.width * (model.width + model.keys);
  var router = model.experts > 1 ? model.width * model.experts : 0;
  return [attention, 2 * model.width + router];
}

function embedding(model) {
  return model.vocabulary * model.width;
}

function parameters(model, mlps) {
  var block = sum(dense(model)) + (mlps || model.experts) * mlp(model);
  var embeddings = embedding(model) * (model.tied ? 1 : 2);
  return model.layers * block + embeddings + model.width;
}

function multiplied(model) {
  var looked_up = model.tied ? 0 : embedding(model);
  return parameters(model, model.chosen) - looked_up;
}

function run_of(model, mesh, context, batch, micro_batch, more) {
  var experts = model.layers * model.experts * mlp(model);
  return {
    parameters: parameters(model), multiplied: multiplied(model),
    layers: model.layers, width: model.width, context: context, batch: batch,
    micro_batch: micro_batch, mesh: mesh, stage: more.stage,
    recompute: more.recompute, chunks: more.chunks, shards: more.shards || 0,
    keys: model.keys, experts: model.experts > 1 ? experts : 0, chosen: model.chosen
  };
}

// ---- estimates/step_time.py: a run ----

function gpus(run) {
  var m = run.mesh;
  return m.data * m.tensor * m.pipeline * m.context * m.expert;
}

function micro_batches(run) {
  return run.batch / (run.mesh.data * run.mesh.expert * run.micro_batch);
}

function layers_per_rank(run) {
  return run.chunks * Math.ceil(run.layers / (run.mesh.pipeline * run.chunks));
}

function flops(run) {
  var tokens = run.batch * run.context;
  var products = 6.0 * run.multiplied * tokens;
  return [products, 12.0 * run.layers * run.width * run.context * tokens];
}

function utilization(run, gpu, seconds) {
  return sum(flops(run)) / (seconds * gpus(run) * gpu.flops);
}

function link(gpu, ranks) {
  return ranks <= gpu.per_machine ? gpu.inside : gpu.across;
}

function seconds_of(sent, gpu, constants, ranks) {
  var network = constants.network;
  var slower = ranks <= gpu.per_machine ? Math.max(1.0, network) : network;
  return slower * sent / link(gpu, ranks);
}

function own_tokens(run) {
  var mesh = run.mesh;
  return run.batch * run.context / (mesh.data * mesh.context * mesh.expert);
}

function sent_by_tensor(run) {
  var n = run.mesh.tensor;
  var times = run.recompute === "full" ? 6.0 : 4.0;
  times = times * layers_per_rank(run) + 2.0 / run.mesh.pipeline;
  return times * 2.0 * (n - 1) / n * 2.0 * run.width * own_tokens(run);
}

function sent_by_context(run) {
  var n = run.mesh.context;
  var forwards = run.recompute === "full" ? 2.0 : 1.0;
  var rounds = n > 1 ? (forwards + 1.0) * (n - 1) + n : 0.0;
  var keys = (run.keys || run.width) / run.mesh.tensor;
  return rounds * 2.0 * keys * 2.0 * own_tokens(run) * layers_per_rank(run);
}

function sent_by_expert(run) {
  var n = run.mesh.expert;
  var times = run.recompute === "full" ? 6.0 : 4.0;
  var copies = run.chosen * own_tokens(run) / run.mesh.tensor;
  return times * copies * (n - 1) / n * 2.0 * run.width * layers_per_rank(run);
}

var SENT = [8.0, 6.0, 4.0, 6.0];

function sent_by_data(run, parameters, ranks) {
  var shards = run.shards ? Math.min(run.shards, ranks) : ranks;
  var times = run.stage >= 2 ? micro_batches(run) : 1.0;
  var inside = times * SENT[run.stage] * parameters * (shards - 1) / shards;
  var groups = ranks / shards;
  return [inside, times * 4.0 * parameters / shards * (groups - 1) / groups];
}

function data_seconds(run, gpu, constants) {
  var mesh = run.mesh;
  var cut = mesh.tensor * mesh.pipeline;
  var ranks = mesh.data * mesh.context;
  var spanned = run.shards ? mesh.tensor * run.shards : gpus(run);
  var seconds = 0.0;
  [
    [(run.parameters - run.experts) / cut, ranks * mesh.expert],
    [run.experts / cut / mesh.expert, ranks]
  ].forEach(function (of) {
    var sent = sent_by_data(run, of[0], of[1]);
    seconds = seconds + seconds_of(sent[0], gpu, constants, spanned);
    seconds = seconds + constants.network * sent[1] / gpu.across;
  });
  if (spanned <= gpu.per_machine) {
    return seconds;
  }
  var hops = run.stage >= 2 ? 3.0 * micro_batches(run) : 1.0;
  var ring = (run.shards || ranks * mesh.expert) - 1;
  return seconds + constants.network * hops * layers_per_rank(run) * ring * gpu.hop;
}

function parts(run, gpu, constants) {
  var mesh = run.mesh, of = flops(run);
  var again = run.recompute === "full" ? 4.0 / 3.0 : 1.0;
  var speed = gpus(run) * gpu.flops * constants.rate;
  var thin = 1.0 + constants.half * mesh.tensor / run.width;
  var products = of[0] * again / speed * thin;
  var attention = of[1] * again / (speed * constants.attention);
  var waits = (mesh.pipeline - 1) / (run.chunks * micro_batches(run));
  var fullest = layers_per_rank(run) * mesh.pipeline / run.layers;
  var bubble = (products + attention) * (fullest * (1.0 + waits) - 1.0);
  var spanned = mesh.tensor;
  var tensor = seconds_of(sent_by_tensor(run), gpu, constants, spanned);
  spanned = spanned * mesh.context;
  var context = seconds_of(sent_by_context(run), gpu, constants, spanned);
  spanned = spanned * mesh.expert;
  var expert = seconds_of(sent_by_expert(run), gpu, constants, spanned);
  var data = data_seconds(run, gpu, constants);
  if (run.stage >= 2) {
    data = Math.max(0.0, data - (products + attention + bubble));
  }
  return {
    products: products, attention: attention, bubble: bubble, tensor: tensor,
    context: context, expert: expert, data: data
  };
}

// ---- estimates/transformer.py: what a rank keeps ----

function kept_per_token(model, recompute) {
  if (recompute === "full") return 1.0 * model.width;
  var selective = recompute === "selective";
  var kept = selective ? 4.0 : 6.0, inner = selective ? 2.0 : 4.0;
  var outside = kept * model.width + 2.0 * model.keys;
  return outside + model.chosen * (model.width + inner * model.inner);
}

function stage_parameters(model, mesh, stage, layers) {
  var matrices = dense(model)[0], whole = dense(model)[1];
  var mlps = model.experts > 1 ? model.experts * mlp(model) / mesh.expert : 0;
  if (model.experts === 1) matrices = matrices + mlp(model);
  var found = layers * (matrices / mesh.tensor + whole);
  var last = stage === mesh.pipeline - 1;
  var times = (stage === 0) + (last && !(model.tied && mesh.pipeline === 1));
  found = found + times * embedding(model) / mesh.tensor + last * model.width;
  return [found, layers * mlps / mesh.tensor];
}

function states_of(parameters, ranks, stage) {
  if (stage === 3) {
    return [parameters * 4 / ranks, parameters * 4 / ranks, parameters * 8 / ranks];
  }
  var optimizer = 12.0 * parameters / (stage ? ranks : 1);
  return [2.0 * parameters, 4.0 * parameters, optimizer];
}

function kept_by_stage(model, run, stage) {
  var mesh = run.mesh;
  var layers = layers_per_rank(run);
  var both = stage_parameters(model, mesh, stage, layers);
  var dense = both[0], experts = both[1];
  var ranks = mesh.data * mesh.context;
  var of_dense = states_of(dense, ranks * mesh.expert, run.stage);
  var of_experts = states_of(experts, ranks, run.stage);
  var kept = of_dense.map(function (size, place) { return size + of_experts[place]; });
  var tokens = run.micro_batch * run.context / mesh.context / mesh.tensor;
  var flying = Math.min(mesh.pipeline - stage, micro_batches(run));
  if (run.chunks > 1) flying = flying + (mesh.pipeline - 1) / run.chunks;
  var block = 2.0 * tokens * kept_per_token(model, run.recompute);
  var moment = 0.0;
  if (stage === mesh.pipeline - 1) moment = 12.0 * tokens * model.vocabulary;
  if (run.recompute !== "none") {
    moment = Math.max(moment, 2.0 * tokens * kept_per_token(model, "none"));
  }
  if (run.stage >= 3) {
    moment = moment + 2.0 * (dense + experts) / layers * Math.min(2.0, layers);
  }
  return {
    weights: kept[0], gradients: kept[1], optimizer: kept[2],
    activations: flying * layers * block, moment: moment
  };
}

function kept_by_run(model, run) {
  var first = kept_by_stage(model, run, 0);
  var last = kept_by_stage(model, run, run.mesh.pipeline - 1);
  return total(last) > total(first) ? last : first;
}

// ---- a sum, from the first to the last ----

function sum(numbers) {
  return numbers.reduce(function (so_far, number) { return so_far + number; }, 0);
}

function total(named) {
  return sum(Object.keys(named).map(function (name) { return named[name]; }));
}

// ---- lesson21.py: which plans there are, and what one takes ----

// Why there is no such plan, in a sentence; "" if there is one. chosen: what the page's
// controls say. The rules are those of lesson21.meshes and lesson21.runs_on.
function problem(data, chosen) {
  var model = data.models[chosen.model], gpu = data.gpus[chosen.gpu];
  var whole = function (number) { return Number.isInteger(number) && number > 0; };
  if (![chosen.gpus, chosen.batch, chosen.context].every(whole)) {
    return "GPUs, sequences and tokens are whole numbers above 0.";
  }
  var ranks = chosen.tensor * chosen.pipeline * chosen.context_ranks * chosen.expert;
  if (chosen.gpus % ranks) {
    return ranks + " ranks (tensor × pipeline × context × expert) cannot share " +
      chosen.gpus + " GPUs: that leaves no whole number of data ranks.";
  }
  if (chosen.tensor > gpu.per_machine) {
    return "A machine has " + gpu.per_machine + " GPUs, and " + chosen.tensor +
      " tensor ranks would talk across machines.";
  }
  if (groups(model) % chosen.tensor) {
    return chosen.tensor + " tensor ranks cannot share " + groups(model) +
      " heads of keys.";
  }
  if (chosen.pipeline * chosen.chunks > model.layers) {
    return chosen.pipeline + " pipeline ranks × " + chosen.chunks + " chunks are more " +
      "than the " + model.layers + " layers.";
  }
  if (chosen.context_ranks > 1 && chosen.context < data.shortest * chosen.context_ranks) {
    return "A context rank has at least " + data.shortest + " tokens, but " +
      chosen.context_ranks + " of them would share " + chosen.context + ".";
  }
  var pieces = (chosen.context_ranks > 1 ? 2 * chosen.context_ranks : 1) * chosen.tensor;
  if (chosen.context % pieces) {
    return chosen.context + " tokens cannot be cut into " + pieces +
      " equal parts (tensor ranks, times 2 × context ranks if there are several).";
  }
  if (model.experts % chosen.expert) {
    return chosen.expert + " expert ranks cannot share " + (model.experts > 1 ?
      model.experts + " experts." : "a model without experts.");
  }
  var mesh = mesh_of(chosen), each = mesh.data * mesh.expert * chosen.micro_batch;
  if (chosen.batch % each) {
    return chosen.batch + " sequences cannot be shared by " + mesh.data * mesh.expert +
      " ranks with micro-batches of " + chosen.micro_batch + ".";
  }
  if (chosen.chunks > 1) {
    if (chosen.pipeline === 1) return "Several chunks need several pipeline ranks.";
    if (chosen.batch / each % chosen.pipeline) {
      return "Several chunks need a number of micro-batches that " + chosen.pipeline +
        " divides, but there are " + chosen.batch / each + " per data rank.";
    }
  }
  if (chosen.stage === 3 && chosen.pipeline > 1) {
    return "With a pipeline, ZeRO-3 would gather the weights for each micro-batch: " +
      "take ZeRO-1.";
  }
  return "";
}

function mesh_of(chosen) {
  var ranks = chosen.tensor * chosen.pipeline * chosen.context_ranks * chosen.expert;
  return {
    data: chosen.gpus / ranks, tensor: chosen.tensor, pipeline: chosen.pipeline,
    context: chosen.context_ranks, expert: chosen.expert
  };
}

// All that the page shows of a plan that there is.
function plan_of(data, chosen) {
  var model = data.models[chosen.model], gpu = data.gpus[chosen.gpu];
  var run = run_of(
    model, mesh_of(chosen), chosen.context, chosen.batch, chosen.micro_batch, chosen);
  var times = parts(run, gpu, data.fitted[chosen.gpu]), kept = kept_by_run(model, run);
  var seconds = total(times);
  var tokens = chosen.tokens || 20 * parameters(model, model.chosen);
  var steps = tokens / (run.batch * run.context);
  var days = steps * seconds / 86400;
  var hours = days * 24 * gpus(run);
  return {
    run: run, kept: kept, parts: times, bytes: total(kept), seconds: seconds,
    limit: data.free * gpu.memory, fits: total(kept) <= data.free * gpu.memory,
    utilization: utilization(run, gpu, seconds), tokens: tokens, days: days,
    tokens_per_second: run.batch * run.context / seconds, gpu_hours: hours,
    cost: hours * (chosen.price || 0)
  };
}
