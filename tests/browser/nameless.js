// What a screen reader would meet without a name.
() => [...document.querySelectorAll("button, input, select, img, [role]")]
  .filter((node) => node.checkVisibility())
  .filter((node) => {
    if (node.tagName === "IMG") return !node.hasAttribute("alt");
    const named = node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") || node.labels?.length;
    return !node.textContent.trim() && !named;
  })
  .filter((node) => node.id !== "live" && !(node.id === "trouble"))
  .map((node) => node.outerHTML.slice(0, 120))
