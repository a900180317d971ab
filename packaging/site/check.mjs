// Opens every page of the site in Chromium at two widths: no errors, nothing wider than the window, links that exist,
// and a search that finds. Arguments: the folder of the site.
import { createRequire } from "node:module";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, resolve } from "node:path";

const root = resolve(process.argv[2]);
const puppeteer = createRequire(resolve("target/tools/puppeteer/x"))("puppeteer-core");
const pages = readdirSync(root, { recursive: true }).filter(name => name.endsWith(".html") && !name.startsWith("assets") && name !== "404.html");
const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json", ".svg": "image/svg+xml" };
const file = url => join(root, decodeURIComponent(new URL(url, site).pathname));
const server = createServer((request, response) => {
    const path = file(request.url);
    response.writeHead(existsSync(path) ? 200 : 404, { "Content-Type": types[extname(path)] ?? "application/octet-stream" });
    response.end(existsSync(path) ? readFileSync(path) : "");
});
await new Promise(ready => server.listen(0, "127.0.0.1", ready));
const site = `http://127.0.0.1:${server.address().port}/`;
const browser = await puppeteer.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
const problems = [];
for (const width of [390, 1280]) {
    const page = await browser.newPage();
    await page.setViewport({ width, height: 800 });
    let name;
    page.on("pageerror", error => problems.push(`${name} at ${width}: ${error.message}`));
    page.on("requestfailed", request => problems.push(`${name} at ${width}: cannot load ${request.url()}`));
    page.on("request", request => /^https?:/.test(request.url()) && !request.url().startsWith(site) && problems.push(`${name} at ${width}: loads ${request.url()}`));
    for (name of pages) {
        await page.goto(site + name, { waitUntil: "load" });
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        if (wide > 0) problems.push(`${name} at ${width}: ${wide} pixels too wide`);
        if (width === 390) continue;
        for (const link of await page.$$eval("a[href]", links => links.map(link => link.href))) {
            if (link.startsWith(site) && !existsSync(file(link))) problems.push(`${name}: no ${link}`);
        }
    }
    name = "search";
    await page.goto(site + "index.html");
    if (width === 1280) {
        await page.type(".md-search__input", "RETRY_EXC_ERR");
        await page.waitForSelector(".md-search-result__item", { timeout: 30000 }).catch(() => problems.push("the search finds nothing"));
    }
    if (process.argv[3]) await page.screenshot({ path: join(process.argv[3], `site-${width}.png`) });
    await page.close();
}
await browser.close();
server.close();
console.log(problems.slice(0, 50).join("\n"));
console.log(`${pages.length} pages at 390 and 1280 pixels, ${problems.length} problems`);
process.exitCode = problems.length ? 1 : 0;
