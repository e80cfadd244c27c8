"use strict";
// Draws the timelines and address maps of a report. The page holds, for each history, columns of numbers as the core
// gives them: what begins with step b and ends with step e is there after each step from b to before e.
(() => {
  const NEVER = 0xffffffff;
  const MAP_ROWS = 40;
  const MOST_LISTED = 50;
  const DASHES = { native: [7, 4], expandable: [2, 3], rallocator: [], active: [9, 3, 2, 3] };
  const sections = [];

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function sizeText(bytes) {
    const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
    const unit = units.find(([, length]) => bytes >= length);
    return unit ? `${(bytes / unit[1]).toFixed(2)} ${unit[0]}` : `${bytes} B`;
  }

  async function inflated(base64) {
    const text = atob(base64.trim());
    const packed = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at += 1) packed[at] = text.charCodeAt(at);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  // A canvas at the screen's resolution, and its size in CSS pixels.
  function sheet(canvas) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return { context, width, height };
  }

  // The last position at which an ascending column is not above the value; -1 if there is none.
  function lastUpTo(column, value) {
    let low = -1, high = column.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (column[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  // Addresses that ever had memory, one range after another, without what lies between.
  class Strip {
    constructor(addresses, sizes) {
      const order = Array.from(addresses.keys()).sort((a, b) => addresses[a] - addresses[b]);
      this.starts = [];
      this.ends = [];
      for (const index of order) {
        const start = addresses[index], end = start + sizes[index], last = this.ends.length - 1;
        if (last >= 0 && start <= this.ends[last]) this.ends[last] = Math.max(this.ends[last], end);
        else { this.starts.push(start); this.ends.push(end); }
      }
      this.offsets = [];
      this.length = 0;
      this.starts.forEach((start, index) => { this.offsets.push(this.length); this.length += this.ends[index] - start; });
    }
    place(address) {
      const index = Math.max(0, lastUpTo(this.starts, address));
      return this.offsets[index] + address - this.starts[index];
    }
    address(place) {
      const index = Math.max(0, lastUpTo(this.offsets, place));
      return this.starts[index] + place - this.offsets[index];
    }
    places(addresses) { return Float64Array.from(addresses, (address) => this.place(address)); }
  }

  class Policy {
    constructor(layout, buffer) {
      this.name = layout.name;
      for (const [key, place] of Object.entries(layout)) {
        if (key === "name") continue;
        const isNarrow = /_(begin|end|freed|step)$/.test(key);
        this[key] = new (isNarrow ? Uint32Array : Float64Array)(buffer, place[0], place[1]);
      }
      this.peak = this.level_reserved.reduce((most, level) => Math.max(most, level), 0);
    }
    // Worked out at the first use: only policies that are looked at need it.
    get strip() {
      if (!this.madeStrip) {
        this.madeStrip = new Strip(this.segment_address, this.segment_size);
        this.blockPlaces = this.madeStrip.places(this.block_address);
        this.segmentPlaces = this.madeStrip.places(this.segment_address);
      }
      return this.madeStrip;
    }
    level(step) {
      const at = lastUpTo(this.level_step, step);
      const of = (column) => (at < 0 ? 0 : column[at]);
      return { allocated: of(this.level_allocated), active: of(this.level_active), reserved: of(this.level_reserved) };
    }
  }

  class History {
    constructor(root, meta, buffer) {
      this.root = root;
      this.steps = meta.steps;
      this.times = new Float64Array(buffer, meta.times[0], meta.times[1]);
      this.policies = meta.policies.map((layout) => new Policy(layout, buffer));
      this.peak = this.policies.reduce((most, policy) => Math.max(most, policy.peak), 1);
      this.from = 0;
      this.to = Math.max(1, this.steps - 1);
      this.drawn = { segments: [], blocks: [] };
      this.find = (selector) => root.querySelector(selector);
      this.slider = this.find(".moment");
      this.listen();
      this.drawAll();
    }

    get policy() { return this.policies[Number(this.find(".policy").value)]; }
    get step() { return Number(this.slider.value); }

    listen() {
      this.slider.addEventListener("input", () => this.later("moment", () => this.drawMoment()));
      this.find(".policy").addEventListener("change", () => this.drawAll());
      this.find(".zoom-in").addEventListener("click", () => this.zoom(0.5));
      this.find(".zoom-out").addEventListener("click", () => this.zoom(2));
      this.find(".earlier").addEventListener("click", () => this.shift(-0.5));
      this.find(".later").addEventListener("click", () => this.shift(0.5));
      this.find(".whole").addEventListener("click", () => this.show(0, this.steps - 1));
      this.find(".map-table").addEventListener("toggle", () => this.list());
      this.find(".map").addEventListener("pointermove", (event) => this.point(event));
      const timeline = this.find(".timeline");
      let pressed = null;
      timeline.addEventListener("pointerdown", (event) => { pressed = this.stepAt(event); });
      timeline.addEventListener("pointerup", (event) => {
        if (pressed === null) return;
        const released = this.stepAt(event);
        const [from, to] = [Math.min(pressed, released), Math.max(pressed, released)];
        pressed = null;
        if (to - from > (this.to - this.from) / 50) this.show(from, to);
        else { this.slider.value = released; this.drawMoment(); }
      });
      timeline.addEventListener("wheel", (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.stepAt(event));
      }, { passive: false });
    }

    // One drawing for all that happens before the next frame.
    later(what, draw) {
      this.waiting = this.waiting || new Set();
      if (this.waiting.has(what)) return;
      this.waiting.add(what);
      requestAnimationFrame(() => { this.waiting.delete(what); draw(); });
    }

    drawAll() {
      this.drawTimeline();
      this.drawMoment();
      this.drawLegends();
    }

    drawMoment() {
      this.drawMap();
      this.drawCursor();
      const { step, policy } = this;
      const level = policy.level(step);
      const seconds = ((this.times[step] || 0) / 1e6).toFixed(3);
      const text = `After step ${step.toLocaleString("en")} of ${this.steps.toLocaleString("en")} (${seconds} s), ${policy.name}: `
        + `allocated ${sizeText(level.allocated)}, active ${sizeText(level.active)}, reserved ${sizeText(level.reserved)}, `
        + `in ${this.drawn.blocks.length.toLocaleString("en")} blocks.`;
      this.find(".readout").textContent = text;
      this.slider.setAttribute("aria-valuetext", text);
      if (this.find(".map-table").open) this.list();
    }

    // The timeline.

    stepAt(event) {
      const box = this.find(".timeline").getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return Math.round(this.from + share * (this.to - this.from));
    }

    show(from, to) {
      const last = Math.max(1, this.steps - 1);
      const length = Math.min(last, Math.max(20, to - from));
      this.from = Math.round(Math.max(0, Math.min(from, last - length)));
      this.to = Math.round(this.from + length);
      this.later("timeline", () => { this.drawTimeline(); this.drawCursor(); });
    }
    zoom(factor, around = this.step) {
      const center = around >= this.from && around <= this.to ? around : (this.from + this.to) / 2;
      this.show(center - (center - this.from) * factor, center + (this.to - center) * factor);
    }
    shift(share) {
      const by = (this.to - this.from) * share;
      const last = Math.max(1, this.steps - 1);
      const from = Math.max(0, Math.min(this.from + by, last - (this.to - this.from)));
      this.show(from, from + this.to - this.from);
    }

    series() {
      const { policy } = this;
      const lines = this.policies.map((one) => ({
        name: `reserved, ${one.name}`, color: one.name, dash: DASHES[one.name] || [], steps: one.level_step,
        levels: one.level_reserved, width: one === policy ? 2.5 : 1.5,
      }));
      const own = (name, levels, fill) => ({
        name: `${name}, ${policy.name}`, color: name, dash: DASHES[name] || [], steps: policy.level_step, levels, fill,
        width: 1.2,
      });
      return [own("allocated", policy.level_allocated, true), own("active", policy.level_active, false), ...lines];
    }

    drawTimeline() {
      const { context, width, height } = sheet(this.find(".timeline"));
      const top = 8, bottom = height - 22;
      const y = (level) => bottom - (bottom - top) * level / this.peak;
      context.font = "12px system-ui, sans-serif";
      context.strokeStyle = color("soft");
      context.fillStyle = color("text");
      for (let part = 1; part <= 4; part += 1) {
        const level = this.peak * part / 4;
        context.beginPath();
        context.moveTo(0, y(level));
        context.lineTo(width, y(level));
        context.stroke();
      }
      for (const line of this.series()) this.drawSeries(context, line, width, y);
      context.setLineDash([]);
      context.fillStyle = color("text");
      const label = (text, x, at) => {
        context.fillStyle = color("page");
        context.fillRect(x - 2, at - 11, context.measureText(text).width + 4, 14);
        context.fillStyle = color("text");
        context.fillText(text, x, at);
      };
      for (let part = 1; part <= 4; part += 1) label(sizeText(this.peak * part / 4), 4, y(this.peak * part / 4) + 13);
      context.fillText(`step ${this.from.toLocaleString("en")}`, 4, height - 6);
      const end = `step ${this.to.toLocaleString("en")}`;
      context.fillText(end, width - context.measureText(end).width - 4, height - 6);
    }

    // A line through the highest and the lowest level of each pixel's steps, so that no peak is lost.
    drawSeries(context, line, width, y) {
      const { steps, levels } = line;
      const columns = Math.max(1, Math.floor(width));
      const span = this.to - this.from;
      let at = lastUpTo(steps, this.from);
      let level = at < 0 ? 0 : levels[at];
      context.beginPath();
      context.moveTo(0, y(level));
      for (let column = 0; column < columns; column += 1) {
        const until = this.from + span * (column + 1) / columns;
        let low = level, high = level;
        const before = level;
        while (at + 1 < steps.length && steps[at + 1] <= until) {
          at += 1;
          level = levels[at];
          if (level < low) low = level;
          if (level > high) high = level;
        }
        const x = (column + 0.5) * width / columns;
        if (low === high) { context.lineTo(x, y(level)); continue; }
        context.lineTo(x, y(before));
        context.lineTo(x, y(line.fill ? before : low));
        context.lineTo(x, y(high));
        context.lineTo(x, y(level));
      }
      context.setLineDash(line.dash);
      context.lineWidth = line.width;
      context.strokeStyle = color(line.color);
      context.stroke();
      if (line.fill) {
        context.lineTo(width, y(0));
        context.lineTo(0, y(0));
        context.globalAlpha = 0.2;
        context.fillStyle = color(line.color);
        context.fill();
        context.globalAlpha = 1;
      }
    }

    drawCursor() {
      const { context, width, height } = sheet(this.find(".cursor"));
      const share = (this.step - this.from) / (this.to - this.from);
      if (share < 0 || share > 1) return;
      context.strokeStyle = color("text");
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(share * width, 0);
      context.lineTo(share * width, height - 20);
      context.stroke();
    }

    // The map.

    drawMap() {
      const { policy, step } = this;
      const { strip } = policy;
      const { context, width, height } = sheet(this.find(".map"));
      // Whole bytes to a row, so that the end of one is exactly the start of the next.
      const bytes = Math.max(1, Math.ceil(strip.length / MAP_ROWS)), pitch = height / MAP_ROWS;
      this.scale = { bytes, pitch, width };
      context.fillStyle = color("unmapped");
      context.fillRect(0, 0, width, height);
      // A piece goes over as many rows as it has to; `edge` leaves a hairline between neighbours.
      const fill = (place, size, edge) => {
        let from = place;
        const end = place + size;
        while (from < end) {
          const row = Math.min(MAP_ROWS - 1, Math.floor(from / bytes));
          const to = row === MAP_ROWS - 1 ? end : Math.min(end, (row + 1) * bytes);
          const x = (from - row * bytes) * width / bytes, long = (to - from) * width / bytes;
          context.fillRect(x, row * pitch + 1, Math.max(0.4, edge && long > 3 ? long - 1 : long), pitch - 2);
          from = to;
        }
      };
      const segments = [], blocks = [];
      context.fillStyle = color("free");
      const { segment_begin: begins, segment_end: ends } = policy;
      for (let index = 0; index < begins.length; index += 1) {
        if (begins[index] <= step && step < ends[index]) {
          segments.push(index);
          fill(policy.segmentPlaces[index], policy.segment_size[index], false);
        }
      }
      const { block_begin: first, block_end: last, block_freed: freed } = policy;
      for (const isPending of [false, true]) {
        context.fillStyle = color(isPending ? "pending" : "block");
        for (let index = 0; index < first.length; index += 1) {
          if (first[index] <= step && step < last[index] && (freed[index] <= step) === isPending) {
            blocks.push(index);
            fill(policy.blockPlaces[index], policy.block_size[index], true);
          }
        }
      }
      this.drawn = { segments, blocks };
    }

    stateOf(index) { return this.policy.block_freed[index] <= this.step ? "active_pending_free" : "active_allocated"; }

    // What the map shows, for whoever wants to check it: address, size and state of each rectangle.
    rectangles() {
      const { policy } = this;
      return {
        step: this.step,
        policy: policy.name,
        segments: this.drawn.segments.map((index) => [policy.segment_address[index], policy.segment_size[index]]),
        blocks: this.drawn.blocks.map((index) => [policy.block_address[index], policy.block_size[index], this.stateOf(index)]),
      };
    }

    // Where the middle of an address range is drawn, in the canvas's own pixels.
    pixelOf(address) {
      const place = this.policy.strip.place(address);
      const row = Math.min(MAP_ROWS - 1, Math.floor(place / this.scale.bytes));
      const ratio = this.find(".map").width / this.scale.width;
      const x = (place - row * this.scale.bytes) * this.scale.width / this.scale.bytes;
      return [Math.floor(x * ratio), Math.floor((row + 0.5) * this.scale.pitch * ratio)];
    }

    point(event) {
      const box = this.find(".map").getBoundingClientRect();
      const row = Math.min(MAP_ROWS - 1, Math.max(0, Math.floor((event.clientY - box.top) / this.scale.pitch)));
      const { policy } = this;
      const address = policy.strip.address((row + (event.clientX - box.left) / box.width) * this.scale.bytes);
      const holds = (start, size) => start <= address && address < start + size;
      const block = this.drawn.blocks.find((index) => holds(policy.block_address[index], policy.block_size[index]));
      const isMapped = this.drawn.segments.some((index) => holds(policy.segment_address[index], policy.segment_size[index]));
      const at = `0x${Math.floor(address).toString(16)}`;
      this.find(".pointed").textContent = block === undefined
        ? `${at}: ${isMapped ? "free" : "no memory here"}`
        : `${at}: ${this.words(block)} of ${sizeText(policy.block_size[block])}, since step ${policy.block_begin[block].toLocaleString("en")}`;
    }

    words(index) { return this.stateOf(index) === "active_allocated" ? "allocated" : "pending"; }

    list() {
      if (!this.find(".map-table").open) return;
      const { policy } = this;
      const order = [...this.drawn.blocks].sort((a, b) => policy.block_size[b] - policy.block_size[a]);
      const rows = order.slice(0, MOST_LISTED).map((index) => {
        const row = document.createElement("tr");
        const cells = [
          `0x${policy.block_address[index].toString(16)}`, sizeText(policy.block_size[index]), this.words(index),
          policy.block_begin[index].toLocaleString("en"),
        ];
        cells.forEach((text, column) => {
          const cell = document.createElement(column === 0 ? "th" : "td");
          if (column === 0) cell.scope = "row";
          cell.textContent = text;
          row.append(cell);
        });
        return row;
      });
      this.find(".map-table tbody").replaceChildren(...rows);
      const more = order.length > MOST_LISTED ? `, of ${order.length.toLocaleString("en")}` : "";
      this.find(".map-table caption").textContent = `The ${rows.length} largest blocks${more}, after step ${this.step.toLocaleString("en")}`;
    }

    // Legends are drawn as what they explain is drawn.

    drawLegends() {
      const entry = (text, draw) => {
        const item = document.createElement("li");
        const sample = document.createElement("canvas");
        sample.setAttribute("aria-hidden", "true");
        item.append(sample, text);
        return { item, draw: () => draw(sheet(sample)) };
      };
      const line = (one) => entry(one.name, ({ context, width, height }) => {
        context.setLineDash(one.dash);
        context.lineWidth = Math.max(2, one.width);
        context.strokeStyle = color(one.color);
        context.beginPath();
        context.moveTo(0, height / 2);
        context.lineTo(width, height / 2);
        context.stroke();
      });
      const patch = (text, name) => entry(text, ({ context, width, height }) => {
        context.fillStyle = color(name);
        context.fillRect(0, 0, width, height);
        context.strokeStyle = color("line");
        context.strokeRect(0.5, 0.5, width - 1, height - 1);
      });
      const put = (selector, entries) => {
        this.find(selector).replaceChildren(...entries.map((one) => one.item));
        entries.forEach((one) => one.draw());
      };
      put(".timeline-legend", this.series().map(line));
      put(".map-legend", [patch("allocated", "block"), patch("pending", "pending"), patch("free", "free"), patch("no memory", "unmapped")]);
    }
  }

  async function start() {
    for (const root of document.querySelectorAll(".history")) {
      const meta = JSON.parse(root.querySelector(".meta").textContent);
      const data = root.querySelector(".data");
      sections.push(new History(root, meta, await inflated(data.textContent)));
      data.remove();
    }
    const redraw = () => sections.forEach((section) => section.later("all", () => section.drawAll()));
    window.addEventListener("resize", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    window.rallocatorReport = { sections, readyMs: performance.now() };
    document.documentElement.dataset.ready = "true";
  }

  start().catch((error) => {
    for (const text of document.querySelectorAll(".readout")) text.textContent = `The charts cannot be drawn here: ${error.message}`;
    throw error;
  });
})();
