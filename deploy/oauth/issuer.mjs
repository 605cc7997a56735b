// An OAuth 2.1 issuer to try belljar with: docs/guides/oauth.md walks through it.
//
//     npm install && BELLJAR_URL=http://127.0.0.1:8000/mcp npm start
//
// Its login page accepts every name and password, and it forgets everything when it ends, so it listens on loopback only.
// What a real issuer must do the same: publish its keys, let clients register (or register them by hand), and issue access
// tokens that are JWTs whose `aud` is belljar's URL.
import { generateKeyPairSync } from "node:crypto";
import Provider from "oidc-provider";

const port = Number(process.env.PORT ?? 9000);
const issuer = `http://127.0.0.1:${port}`;
const belljar = process.env.BELLJAR_URL ?? "http://127.0.0.1:8000/mcp";
const scope = "belljar";
// Its own at every start, because the library's development keys are public: anyone could sign tokens with them.
const key = generateKeyPairSync("rsa", { modulusLength: 2048 }).privateKey.export({ format: "jwk" });

const provider = new Provider(issuer, {
  scopes: ["openid", "offline_access", scope],
  jwks: { keys: [{ ...key, kid: String(Date.now()), use: "sig", alg: "RS256" }] },
  // For programs without a person, such as a nightly job: its tokens are its own principal in belljar.
  clients: process.env.JOB_SECRET
    ? [{
        client_id: "nightly-job",
        client_secret: process.env.JOB_SECRET,
        grant_types: ["client_credentials"],
        redirect_uris: [],
        response_types: [],
      }]
    : [],
  features: {
    devInteractions: { enabled: true },
    // MCP clients register themselves (RFC 7591).
    registration: { enabled: true },
    clientCredentials: { enabled: true },
    // MCP clients send `resource` (RFC 8707). The answer decides what the token is good for.
    resourceIndicators: {
      enabled: true,
      defaultResource: () => belljar,
      useGrantedResource: () => true,
      getResourceServerInfo(_context, resource) {
        if (resource.replace(/\/$/, "") !== belljar.replace(/\/$/, "")) {
          throw new Error(`there is no resource ${resource} here`);
        }
        return { scope, audience: belljar, accessTokenFormat: "jwt", accessTokenTTL: 3600, jwt: { sign: { alg: "RS256" } } };
      },
    },
  },
  // Clients that do not name a scope get what belljar asks for.
  clientDefaults: { scope: `openid offline_access ${scope}` },
  findAccount: (_context, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
});

const server = provider.listen(port, "127.0.0.1", () => {
  console.log(`issuer ${issuer}/.well-known/openid-configuration`);
});
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => server.close(() => process.exit(0)));
