"""A form that is read, filled in by code, completed by a person, and sent once, with a receipt.

The page runs on the session's own loopback here; a real one needs its host in the setting `egress`. A PDF works the
same way, with `form.save("filled.pdf")` in the place of `form.submit()`.
"""

from shared import run, shown

import belljar

PAGE = """
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

PAGE = '''<title>Visit</title><form method="post">
  <input type="hidden" name="token" value="7f3a">
  <label>Name <input name="name" required></label>
  <label>Nights <input type="number" name="nights" min="1" max="14" required></label>
  <label>Room <select name="room"><option>single<option>double</select></label>
  <label><input type="checkbox" name="rules" required> I keep the rules</label><button>Book</button></form>'''

class Site(BaseHTTPRequestHandler):
    def do_GET(self): self.answer(PAGE)
    def do_POST(self):
        sent = self.rfile.read(int(self.headers['Content-Length'])).decode()
        self.answer('<title>Booked</title>' + sent.replace('&', ', '))
    def log_message(self, *_): pass
    def answer(self, text):
        self.send_response(200)
        self.send_header('Content-Type', 'text/html')
        self.end_headers()
        self.wfile.write(text.encode())

site = HTTPServer(('127.0.0.1', 0), Site)
threading.Thread(target=site.serve_forever, daemon=True).start()
"""
FILL = """
import forms

form = forms.open(f"http://127.0.0.1:{site.server_port}/")
form.ask({"name": "Ada", "nights": 30, "room": "double"}, "A room for Ada")
print(form.preview())
receipt = form.submit()
print(receipt["outcome"], "->", receipt["answer"]["title"], receipt["answer"]["text"])
"""


async def answer(question: str) -> str:
    """Answer as the person would. A program gets the question as text, and answers several fields with JSON."""
    print(f"asked: {question}")
    return '{"nights": 3, "rules": true}'


async def main() -> None:
    """Fill in the form."""
    async with belljar.open_session() as session:
        shown(await session.execute(PAGE))
        print(shown(await session.execute(FILL, on_input=answer)))


if __name__ == "__main__":
    run(main)
