// A host of MCP Apps: npm's `app-bridge` around a frame with the policy that the specification gives views by default.
// The test gives it `callTool` and `readResource`, which reach the server through a real MCP client.
import { AppBridge, PostMessageTransport } from "@modelcontextprotocol/ext-apps/app-bridge";

window.host = async (theme, result) => {
  const frame = document.querySelector("iframe");
  const context = { theme, containerDimensions: { maxHeight: 900 }, styles: { variables: { "--color-text-danger": theme === "dark" ? "#ff9a90" : "#a4161a" } } };
  const bridge = new AppBridge(null, { name: "test-host", version: "1" }, { serverTools: {}, serverResources: {}, openLinks: {} }, { hostContext: context });
  bridge.oncalltool = async (params) => JSON.parse(await window.callTool(JSON.stringify(params)));
  bridge.onreadresource = async (params) => JSON.parse(await window.readResource(JSON.stringify(params)));
  bridge.onopenlink = async ({ url }) => { window.openedLink = url; return {}; };
  bridge.onsizechange = ({ height }) => { frame.style.height = `${Math.min(height, 900)}px`; };
  const ready = new Promise((resolve) => { bridge.oninitialized = resolve; });
  await bridge.connect(new PostMessageTransport(frame.contentWindow, frame.contentWindow));
  frame.src = "/view";
  await ready;
  bridge.sendToolInput({ arguments: {} });
  bridge.sendToolResult(result);
};
