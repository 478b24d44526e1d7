// Saves a picture of the page as an SVG file that needs no style sheet.

const COPIED = ["fill", "fill-opacity", "stroke", "stroke-width", "font-size", "font-family", "font-weight"];

export function save(svg, name) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, place) => {
    const style = getComputedStyle(originals[place]);
    for (const property of COPIED) element.setAttribute(property, style.getPropertyValue(property));
    for (const attribute of ["class", "tabindex", "data-id"]) element.removeAttribute(attribute);
  });
  const { width, height } = svg.viewBox.baseVal;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [key, value] of [["width", width], ["height", height], ["fill", getComputedStyle(document.body).backgroundColor]]) {
    back.setAttribute(key, value);
  }
  copy.prepend(back);
  const text = new XMLSerializer().serializeToString(copy);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  link.download = `${name}.svg`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
