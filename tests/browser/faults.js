// What a person would see as broken: text or controls on top of each other, beyond the edge, or cut off in their box.
() => {
  const kinds = "button, input, select, h1, h2, h3, p, dt, dd, td, th, small, figcaption strong, .name";
  const seen = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest(".unseen, .skip");
  const name = (node) => `${node.tagName}#${node.id}.${node.className} "${node.textContent.trim().slice(0, 30)}"`;
  const nodes = [...document.querySelectorAll(kinds)].filter(seen);
  const faults = [];
  for (const node of nodes) {
    const box = node.getBoundingClientRect();
    const style = getComputedStyle(node);
    if (box.left < -1 || box.right > document.documentElement.clientWidth + 1) faults.push(`beyond the edge: ${name(node)}`);
    if (style.textOverflow !== "ellipsis" && style.overflow !== "visible" && node.scrollWidth > node.clientWidth + 2) {
      faults.push(`cut: ${name(node)}`);
    }
  }
  // The bar of actions stays in view while the grid scrolls under it, and the queue ends where the line does.
  const apart = (a, b) => a.closest(".strip") || b.closest(".strip") || a.closest(".actions") !== b.closest(".actions");
  for (const [i, a] of nodes.entries()) {
    for (const b of nodes.slice(i + 1)) {
      if (a.contains(b) || b.contains(a) || apart(a, b)) continue;
      const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 2 && y > 2) faults.push(`overlap: ${name(a)} and ${name(b)}`);
    }
  }
  return faults;
}
